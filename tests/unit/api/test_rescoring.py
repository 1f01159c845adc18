"""Another reward over a run's trajectories: the report, the changes, and that the run itself stays unchanged."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

import rayapp
from rayapp.cli.main import run
from rayapp.core.errors import InputError
from rayapp.core.types import Group, Prompt, Reward, RolloutStatus, Trajectory
from rayapp.rollout.group import with_reward
from rayapp.runs.trajectories import write_trajectories
from rayapp.tasks.code.benchmarks import load_benchmark
from support.stubs.judge_stub import JudgeStub

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "crash":
        raise RuntimeError("no")
    return float(str(ground_truth) in solution_str) + extra_info.get("bonus", 0)
"""
MAX_SUBARRAY_SUM = """```python
def max_subarray_sum(xs):
    best = here = xs[0]
    for x in xs[1:]:
        here = max(x, here + x)
        best = max(best, here)
    return best
```"""
IDS, MASK = np.arange(3, dtype=np.int32), np.array([False, True, True])


def group(number: int, texts: Sequence[str], rewards: Sequence[Reward], **prompt: Any) -> Group:
    asked: Any = {"task": "openai/gsm8k", "ground_truth": "42", "extra_info": {"bonus": 0}} | prompt
    members = tuple(
        with_reward(Trajectory.of_tokens(IDS, MASK, reward=reward, completion_text=text), reward)
        for text, reward in zip(texts, rewards, strict=True)
    )
    messages = ({"role": "user", "content": "6 x 7?"},)
    return Group(
        group_id=number,
        prompt=Prompt(text="?", token_ids=IDS[:1], messages=messages, **asked),
        trajectories=members,
    )


def worth(*values: float) -> list[Reward]:
    return [Reward(value=value, terms={"solved": value}) for value in values]


def save(folder: Path, steps: dict[int, list[Group]], **config: Any) -> Path:
    sections = {
        "run": {"name": folder.name, "output_dir": str(folder.parent)},
        "tasks": ["gone.parquet"],
    }
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(sections | config))
    for step, groups in steps.items():
        write_trajectories(folder / "trajectories" / f"step={step:06}.parquet", step, groups)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.parquet")}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two steps, rewarded by the number of 2s."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARD)
    lost = Reward.invalid("reward_timeout", "late")
    return save(
        tmp_path / "run",
        {
            1: [
                group(0, ["42", "2", "none", "222"], worth(1, 1, 0, 3)),
                group(1, ["it is 42", "no"], [lost, *worth(0)]),
            ],
            2: [group(2, ["a 42", "b"], worth(0, 1))],
        },
    )


def test_a_function_is_told_what_the_trajectories_hold_and_the_run_stays_as_it_was(recorded: Path) -> None:
    before = content(recorded)
    found = rayapp.rescore(recorded, "rewards.py:compute_score")

    assert [(row["before"], row["after"]) for row in found.rows] == [
        (1, 1), (1, 0), (0, 0), (3, 0), (None, 1), (0, 0), (0, 1), (1, 0),
    ]  # fmt: skip
    summary = found.summary
    assert (summary["trajectories"], summary["failed"], summary["changed"]) == (8, 0, 4)
    assert (summary["mean_before"], summary["mean_after"]) == (pytest.approx(6 / 7), pytest.approx(2 / 7))
    # Group 0 has ranks 2.5 2.5 1 4 and 4 2 2 2; group 2 is reversed; group 1 had equal rewards before.
    assert summary["rank_correlation"] == pytest.approx((0.0 - 1.0) / 2)
    assert [(row["group_id"], row["index"]) for row in found.largest(1)] == [(0, 3)]
    assert content(recorded) == before
    assert list(found.frame["step"]) == [1] * 6 + [2] * 2


def test_the_command_prints_what_changed_writes_a_file_and_fails_where_a_reward_is_missing(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rescore", str(recorded), "--reward", "rewards.py:compute_score"]
    assert run([*words, "--steps", "2", "--output", "out/new.parquet", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    table = pq.read_table(recorded.parent / "out" / "new.parquet").to_pylist()

    assert printed["summary"]["changed"] == 2
    assert [row["after"] for row in printed["largest"]] == [1.0, 0.0]
    assert [(row["step"], row["group_id"], row["before"], row["after"]) for row in table] == [
        (2, 2, 0, 1),
        (2, 2, 1, 0),
    ]
    assert dict(table[0]["terms"])["score"] == 1.0

    save(recorded.parent / "crashed", {1: [group(0, ["crash", "[red]x[/]"], worth(1, 1))]})
    assert run(["rescore", "crashed", "--reward", "rewards.py:compute_score"]) == 1
    told = capsys.readouterr().out
    assert "failed/reward_error" in told
    assert "[red]x[/]" in told


def test_the_verdict_is_what_the_rules_say_now(recorded: Path) -> None:
    found = rayapp.rescore(recorded, "verdict", steps=range(2, 3), overrides={"reward.method": "flexible"})
    strict = rayapp.rescore(recorded, "verdict", steps=range(2, 3))

    assert [row["after"] for row in found.rows] == [1.0, 0.0]
    assert [row["after"] for row in strict.rows] == [0.0, 0.0]


def test_a_tasks_verdict_is_found_again_with_the_same_hidden_tests(tmp_path: Path) -> None:
    asked = {"task": "max_subarray_sum", "ground_truth": None, "extra_info": {}}
    folder = save(
        tmp_path / "run",
        {1: [group(0, [MAX_SUBARRAY_SUM, "    return xs"], worth(0.5, 0.5), **asked)]},
        data={},
        tasks=["max_subarray_sum"],
    )

    assert [row["after"] for row in rayapp.rescore(folder, "verdict").rows] == [1.0, -1.0]


def test_a_benchmarks_trajectories_are_scored_by_the_problem_that_each_answers(tmp_path: Path) -> None:
    problems = load_benchmark("benchmark:humaneval")[:2]
    groups = [
        replace(
            group(number, [f"```python\n{problem.reference}\n```"], worth(1)),
            prompt=Prompt(task=problem.name, text="", token_ids=IDS[:1], messages=asked(problem.prompt)),
        )
        for number, problem in enumerate(problems)
    ]
    unknown = replace(groups[0], prompt=replace(groups[0].prompt, messages=asked("another question")))
    config: Any = {"data": {}, "tasks": ["benchmark:humaneval"]}

    found = rayapp.rescore(save(tmp_path / "run", {1: groups}, **config), "verdict")
    assert [row["after"] for row in found.rows] == [1.0, 1.0]
    with pytest.raises(
        InputError, match="its task is unknown, because 164 tasks have the name 'humaneval' and none of them has this"
    ):
        rayapp.rescore(save(tmp_path / "changed", {1: [unknown]}, **config), "verdict")


def asked(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def test_trajectories_without_a_ground_truth_are_refused_by_a_rule_that_needs_one(recorded: Path) -> None:
    folder = save(recorded.parent / "old", {1: [group(0, ["42"], worth(1), ground_truth=None)]})

    with pytest.raises(InputError, match="have no ground_truth"):
        rayapp.rescore(folder, "verdict")


@pytest.mark.parametrize("kind", ["rubric", "pairwise"])
async def test_a_judge_rescores_and_what_it_said_once_costs_nothing_again(tmp_path: Path, kind: str) -> None:
    stub = JudgeStub(lambda text: min(len(text), 10))
    async with stub.running() as url:
        judge = {"name": "q", "kind": kind, "base_url": f"{url}/v1", "model": "m",
                 "rubric": [{"name": "long", "text": "It is long."}]}  # fmt: skip
        folder = save(tmp_path / "run", {1: [group(0, ["a", "bb", "ccc"], worth(1, 0, 0))]}, judges=[judge])
        first = await asyncio.to_thread(rayapp.rescore, folder, "judge:q")
        num_asked = len(stub.bodies)
        again = await asyncio.to_thread(rayapp.rescore, folder, "judge:q")

    assert [row["after"] for row in first.rows] == ([0.1, 0.2, 0.3] if kind == "rubric" else [0.0, 0.5, 1.0])
    assert (first.summary["judged/requests"], num_asked) == ({"rubric": 3, "pairwise": 6}[kind],) * 2
    assert (again.summary["judged/requests"], again.summary["judged/cached"]) == (0.0, num_asked)
    assert len(stub.bodies) == num_asked
    with pytest.raises(InputError, match=r"judge 'p' is not in the config's `judges` \(q\)"):
        rayapp.rescore(folder, "judge:p")


def test_a_trajectory_that_never_came_to_its_end_is_left_out(recorded: Path) -> None:
    failed = Reward.invalid("sandbox", "its workspace died")
    folder = save(recorded.parent / "failed", {1: [group(0, ["42", "42"], [failed, *worth(0)])]})

    assert [row["index"] for row in rayapp.rescore(folder, "rewards.py:compute_score").rows] == [1]


def test_steps_that_are_none_are_refused(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rescore", str(recorded), "--steps", "last"]) == 2
    assert "write one step, or a first and a last step" in capsys.readouterr().err
    assert run(["rescore", str(recorded), "--steps", "7-9"]) == 2
    assert "recorded steps: 1, 2" in capsys.readouterr().err


def test_a_reward_that_failed_is_no_failure_of_a_sandbox() -> None:
    (lost,) = group(0, ["x"], [Reward.invalid("judge_answer", "prose")]).trajectories

    assert lost.status is RolloutStatus.ERROR_REWARD
