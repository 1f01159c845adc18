"""The data behind `rayapp view`, without server or browser: curves, groups, details."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.core.errors import InputError
from rayapp.core.types import CallRecord, Fork, Group, Reward, Trajectory
from rayapp.extras.view.curves import PANELS, Metrics, Panel, curve, keys_of_panel
from rayapp.extras.view.groups import GroupFilter, Groups, Page, facets, find_groups
from rayapp.extras.view.run import ViewedRun, run_state
from rayapp.extras.view.trajectory import (
    group_advantages,
    read_group,
    read_trajectory,
    token_texts,
    turns_of,
)
from rayapp.runs.source import open_source, run_uris
from rayapp.runs.trajectories import write_trajectories
from support import make


def trajectory(
    reward: float, *, status: str = "scored", terms: dict[str, float] | None = None, **fields: Any
) -> Trajectory:
    given = Reward(value=reward, status=status, terms=terms or {"pass_rate": max(0.0, reward)})
    usual = {"completion_text": "x = 1", "rollout_log_probs": np.array([0, 0, -0.5, -2.0], np.float32)}
    return make.trajectory([5, 9, 7, 2], 2, reward=given, **usual | fields)


def group(group_id: int, *trajectories: Trajectory, task: str = "sort", text: str = "Sort it") -> Group:
    return make.group(*trajectories, group_id=group_id, task=task, text=text)


def write(folder: Path, step: int, *groups: Group, name: str = "trajectories") -> Path:
    """Write the groups of a step, and return the run's folder."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    write_trajectories(folder / name / f"step={step:06d}.parquet", step, groups)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps: at 1 a mixed and an equal group, at 2 the first prompt again, and one whose tool failed."""
    first = [
        group(0, trajectory(1.0), trajectory(-1.0, status="timeout")),
        group(1, trajectory(0.5), trajectory(0.5), task="sum", text="Sum it"),
    ]
    tools = {"tool/calls": 2.0, "tool/failed": 1.0}
    second = [group(2, trajectory(1.0), trajectory(1.0)), group(3, trajectory(0.0, terms=tools), text="Use it")]
    folder = write(write(tmp_path / "my-run", 1, *first), 2, *second)
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 10, "reward/mean": 0.25}\n')
    return folder


def index_of(folder: Path) -> Groups:
    return Groups(open_source(str(folder)))


def found(index: Groups, **asked: str) -> list[int]:
    return [row["group_id"] for row in find_groups(index, GroupFilter.parse(asked), Page.parse(asked))["rows"]]


def test_groups_of_one_source_are_found_beside_groups_without_any(run: Path) -> None:
    of_code = make.group(trajectory(1.0), group_id=4, source="code")
    index = index_of(write(run, 3, of_code, group(5, trajectory(0.0))))

    assert facets(index)["sources"] == ["code"]
    assert found(index, source="code") == [4]
    assert sorted(found(index)) == [0, 1, 2, 3, 4, 5]
    assert found(index, sort="source", order="desc")[0] == 4


def test_a_group_is_summed_up_over_its_valid_trajectories(run: Path) -> None:
    row = find_groups(index_of(run), GroupFilter(step_max=1, task="sort"), Page())["rows"][0]

    assert (row["reward_mean"], row["reward_std"], row["reward_min"], row["reward_max"]) == (0.0, 1.0, -1.0, 1.0)
    assert (row["num_trajectories"], row["num_valid"], row["response_tokens_mean"]) == (2, 2, 2.0)
    assert (row["reward_statuses"], row["statuses"]) == (["scored", "timeout"], ["completed"])


def test_rewards_that_are_not_valid_are_in_no_number_of_the_group(tmp_path: Path) -> None:
    gone = replace(trajectory(0.0), reward=Reward.invalid("sandbox_gone", "it died"))
    run = write(tmp_path, 1, group(0, trajectory(1.0), gone))

    row = find_groups(index_of(run), GroupFilter(failure="sandbox_gone"), Page())["rows"][0]

    assert (row["num_valid"], row["reward_mean"], row["reward_min"]) == (1, 1.0, 1.0)


@pytest.mark.parametrize(
    ("asked", "groups"),
    [
        ({}, [2, 3, 0, 1]),
        ({"step_min": "2"}, [2, 3]),
        ({"step_max": "1", "sort": "reward_mean"}, [1, 0]),
        ({"task": "sum"}, [1]),
        ({"reward_min": "0.5"}, [2, 1]),
        ({"reward_max": "0"}, [3, 0]),
        ({"reward_status": "timeout"}, [0]),
        ({"signal": "some"}, [0]),
        ({"signal": "none", "task": "sort", "step_max": "1"}, []),
        ({"tool_failed": "some"}, [3]),
        ({"sort": "group_id", "order": "asc"}, [0, 1, 2, 3]),
        ({"sort": "group_id", "order": "asc", "offset": "1", "limit": "2"}, [1, 2]),
    ],
)
def test_groups_are_filtered_and_sorted_as_asked(run: Path, asked: dict[str, str], groups: list[int]) -> None:
    assert found(index_of(run), **asked) == groups


@pytest.mark.parametrize(
    ("name", "value"),
    [("step_min", "one"), ("reward_min", "much"), ("signal", "maybe"), ("sort", "reward_mean; drop"), ("offset", "x")],
)
def test_a_filter_that_can_not_be_is_refused_by_name(run: Path, name: str, value: str) -> None:
    with pytest.raises(InputError, match=value):
        found(index_of(run), **{name: value})


def test_what_a_person_types_is_a_value_and_never_sql(run: Path) -> None:
    assert found(index_of(run), task="sort' or '1'='1") == []


def test_facets_say_what_there_is(run: Path) -> None:
    said = facets(index_of(run))

    assert said["tasks"] == ["sort", "sum"]
    assert (said["steps"], said["groups"], said["trajectories"], said["tools"]) == ([1, 2], 4, 7, True)
    assert said["reward_statuses"] == ["scored", "timeout"]


def test_new_steps_are_taken_in_and_those_of_a_resumed_run_replaced(run: Path) -> None:
    index = index_of(run)
    assert found(index) == [2, 3, 0, 1]
    (run / "trajectories" / "step=000002.parquet").unlink()
    write(run, 2, group(7, trajectory(0.25)))

    assert found(index) == [7, 0, 1]


def cut_in_half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_a_page(file: Path) -> None:
    table = pq.ParquetFile(file).metadata.row_group(0)
    column = next(column for i in range(table.num_columns) if (column := table.column(i)).path_in_schema == "reward")
    damaged = bytearray(file.read_bytes())
    damaged[column.data_page_offset + column.total_compressed_size - 2] ^= 0xFF
    file.write_bytes(damaged)


def name_a_later_schema(file: Path) -> None:
    table = pq.read_table(file, partitioning=None)
    pq.write_table(table.replace_schema_metadata({b"rayapp.schema_version": b"99"}), file)


def drop_a_column(file: Path) -> None:
    pq.write_table(pq.read_table(file, partitioning=None).drop_columns("turns"), file)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (cut_in_half, "step=000002.parquet can't be read"),
        (damage_a_page, "step=000002.parquet can't be read"),
        (name_a_later_schema, "trajectory schema 99, but this version reads only 1"),
        (drop_a_column, "was written by an older rayapp: it has no column turns"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_problem_on_the_page_and_the_rest_is_shown(
    run: Path, spoil: Callable[[Path], None], problem: str
) -> None:
    spoil(run / "trajectories" / "step=000002.parquet")
    index = index_of(run)

    assert found(index) == [0, 1]
    assert problem in index.problems[0]


def test_curves_go_on_with_the_file_and_start_again_when_a_resumed_run_cut_it(run: Path) -> None:
    metrics, file = Metrics(open_source(str(run))), run / "metrics.jsonl"
    assert [record["step"] for record in metrics.records()] == [1]

    file.write_text(file.read_text() + '{"step": 2, "reward/mean": 0.5}\n{"step": 3, "rew')
    assert [record["step"] for record in metrics.records()] == [1, 2]

    file.write_text(
        '{"step": 1, "reward/mean": 0.1}\n{"step": 2, "reward/mean": 0.75, "more": 1}\n{"step": 3, "reward/mean": 1}\n'
    )
    assert curve(metrics.records(), "reward/mean") == {"steps": [1, 2, 3], "values": [0.1, 0.75, 1]}


def test_long_curves_are_means_of_equal_stretches() -> None:
    records = [{"step": step, "k": step - 1} for step in range(1, 5)]

    assert curve(records, "k", max_points=2) == {"steps": [1.5, 3.5], "values": [0.5, 2.5]}


def test_a_status_that_a_step_lacks_had_a_share_of_zero_there() -> None:
    records = [{"step": 0, "eval/reward/mean": 0.1}, {"step": 1, "status/truncated": 0.5}, {"step": 2}]

    assert curve(records, "status/truncated", absent=0.0)["values"] == [0.5, 0.0]
    assert curve(records, "status/truncated")["values"] == [0.5]


def test_a_pattern_stands_for_something_between_its_ends() -> None:
    panel = Panel(section="s", title="t", meaning="m", keys=("reward/*/mean", "x"), omits=("reward/solved/mean",))
    known = ["reward/mean", "reward/solved/mean", "reward/style/mean", "x", "xy"]

    assert keys_of_panel(panel, known) == ["reward/style/mean", "x"]
    assert len({panel.title for panel in PANELS}) == len(PANELS)
    assert all(panel.meaning for panel in PANELS), "every panel says what it shows"


@pytest.mark.parametrize(
    ("last", "now", "state"),
    [
        (None, 0.0, "waiting"),
        ({"step": 10, "time": 0.0}, 1e9, "finished"),
        ({"step": 5, "time": 1000.0}, 1100.0, "running"),
        ({"step": 5, "time": 1000.0}, 1200.0, "quiet"),
        ({"step": 5, "time": 1000.0, "timing_s/step": 60.0}, 1200.0, "running"),  # 5 steps of 60 s are 300 s
    ],
)
def test_the_log_tells_whether_a_run_goes_on(last: dict[str, float] | None, now: float, state: str) -> None:
    assert run_state([last] if last else [], 10, now=now) == state


@pytest.mark.parametrize(("step", "group_id"), [(1, 99), (77, 0)])
def test_what_is_not_there_is_refused(run: Path, step: int, group_id: int) -> None:
    with pytest.raises(InputError, match=f"step {step} has no"):
        read_group(open_source(str(run)), step, group_id)


class Letters:
    """A tokenizer whose tokens are letters, and 1 and 2 the halves of one character."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text = "".join(chr(96 + one) if one > 2 else {1: "<", 2: ">"}[one] for one in ids)
        return text.replace("<>", "é").replace("<", "\ufffd").replace(">", "\ufffd")


def test_tokens_of_one_character_give_it_to_the_last_of_them() -> None:
    assert token_texts(Letters(), [3, 1, 2, 4]) == ["c", "", "é", "d"]


@given(st.lists(st.integers(1, 26), max_size=40))
def test_the_texts_of_tokens_join_to_the_text_of_all(ids: list[int]) -> None:
    assert "".join(token_texts(Letters(), ids)) == Letters().decode(ids)


@pytest.mark.parametrize(
    ("mask", "forks", "expected"),
    [
        ([0, 0, 1, 1, 0, 1], [], [("prompt", "cd"), ("sampled", "ef"), ("read", "g"), ("sampled", "h")]),
        # Sampled after the same prompt
        ([0, 1, 1, 1], [{"start": 2, "after": 0}], [("prompt", "c"), ("sampled", "d"), ("sampled", "ef")]),
    ],
)
def test_turns_are_stretches_of_the_mask(mask: list[int], forks: list[Any], expected: list[tuple[str, str]]) -> None:
    tokens = {
        "token_ids": list(range(3, 3 + len(mask))),
        "response_mask": list(map(bool, mask)),
        "rollout_log_probs": [-float(i) if sampled else 0.0 for i, sampled in enumerate(mask)],
        "learner_log_probs": None,
        "forks": forks,
    }

    turns = turns_of(tokens, Letters())

    assert [(turn["kind"], turn["text"]) for turn in turns] == expected
    assert turns[-1]["log_probs"][-1] == -float(len(mask) - 1)


def test_a_trajectory_without_a_tokenizer_is_shown_as_text(run: Path) -> None:
    one = read_trajectory(open_source(str(run)), 1, 0, 0, None)

    assert (one["is_tokenized"], one["num_tokens"]) == (False, 4)
    assert [(turn["kind"], turn["text"], turn["num_tokens"]) for turn in one["turns"]] == [
        ("prompt", "Sort it", 2),
        ("sampled", "x = 1", 2),
    ]


@pytest.mark.parametrize("tokenizer", [None, "letters"])
def test_tool_calls_stand_with_the_turn_that_made_them(tmp_path: Path, tokenizer: str | None) -> None:
    call = CallRecord(name="run", arguments='{"a": 1}', output="boom", failure="crash", duration_s=0.5)
    run = write(tmp_path, 1, group(0, trajectory(1.0, turns=(make.turn(2, 4, text="gb", calls=(call,)),))))

    turns = read_trajectory(open_source(str(run)), 1, 0, 0, Letters() if tokenizer else None)["turns"]

    assert [(one["kind"], len(one["calls"])) for one in turns] == [("prompt", 0), ("sampled", 1)]
    assert (turns[1]["calls"][0]["name"], turns[1]["calls"][0]["failure"]) == ("run", "crash")


def test_a_trajectory_that_forked_is_shown_with_the_reason_and_the_run_with_the_number_for_each(tmp_path: Path) -> None:
    note = "rayapp: turn 2 does not continue the conversation: clock in prompt"
    forked = trajectory(1.0, forks=(Fork(start=3, after=-1),), agent_output=f"played\n{note}")

    one = read_trajectory(open_source(str(write(tmp_path, 1, group(0, forked)))), 1, 0, 0, None)
    assert (one["num_forks"], one["agent_output"].splitlines()[1]) == (1, note)
    known = ["agent/forked", "agent/forks", "agent/forks/clock_in_prompt", "agent/forks/retry", "agent/side_calls"]
    shown = {panel.title: keys_of_panel(panel, known) for panel in PANELS}
    assert shown["Why trajectories forked"] == ["agent/forks/clock_in_prompt", "agent/forks/retry"]
    assert shown["Agents' calls"] == ["agent/forked", "agent/side_calls"]


@pytest.mark.parametrize(
    ("rewards", "valid", "algorithm", "expected"),
    [
        ([1.0, 0.0], [True, True], {}, [0.70711, -0.70711]),  # 0.5 / (0.70711 + 1e-6)
        ([1.0, 0.0], [True, True], {"norm_adv_by_std": False}, [0.5, -0.5]),
        ([1.0, 0.0, 9.0], [True, True, False], {"norm_adv_by_std": False}, [0.5, -0.5, None]),
        ([0.5], [True], {}, [0.5]),  # one alone: mean 0, deviation 1
        ([1.0, 0.0], [True, True], {"adv_estimator": "rloo"}, [0.5, -0.5]),
        ([0.0], [False], {}, [None]),
    ],
)
def test_advantages_follow_from_the_rewards(rewards, valid, algorithm, expected) -> None:
    got = group_advantages(rewards, valid, algorithm)

    assert list(got.values) == [None if value is None else pytest.approx(value, abs=1e-5) for value in expected]
    assert ("grpo" in got.label) == (algorithm.get("adv_estimator", "grpo") == "grpo")


def test_a_config_that_does_not_parse_hides_no_run(run: Path) -> None:
    (run / "config.yaml").write_text("a: [")

    assert ViewedRun(open_source(str(run))).config() == {}
    assert json.dumps(ViewedRun(open_source(str(run))).summary())


def test_a_folder_that_holds_runs_stands_for_all_of_them(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("")
    (tmp_path / "no run").mkdir()

    assert set(run_uris(str(tmp_path))) == {str(run), str(tmp_path / "other")}
    assert run_uris(str(run)) == [str(run)]
    assert run_uris(str(tmp_path / "no run")) == [str(tmp_path / "no run")]
    assert run_uris("s3://bucket/runs") == ["s3://bucket/runs"]


@pytest.fixture
def evaluated(run: Path) -> ViewedRun:
    """The run with an evaluation after its second step, in which prompt 0 has a text of its own."""
    groups = [group(0, trajectory(1.0, completion_text="Pineapple = 1")), group(1, trajectory(0.0))]
    return ViewedRun(open_source(str(write(run, 2, *groups, name="evaluations"))))


def test_evaluations_stand_among_the_groups_and_can_be_told_apart(evaluated: ViewedRun) -> None:
    everything = evaluated.groups({})
    of_evaluations = evaluated.groups({"purpose": "eval"})

    assert (everything["total"], of_evaluations["total"], evaluated.groups({"purpose": "train"})["total"]) == (6, 2, 4)
    assert {row["group_id"] for row in of_evaluations["rows"]} == {-1, -2}
    assert evaluated.facets()["evaluated"]
    opened = evaluated.group(2, -1)
    assert opened["trajectories"][0]["completion"] == "Pineapple = 1"
    assert opened["neighbours"] == {"previous": {"step": 2, "group_id": -2}, "next": None}
