"""The list `sources`: a source inherits the keys that it omits, and keys that it can't have are refused with the way
out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.config.config import sources_of
from rayapp.config.loading import load_config, to_yaml
from rayapp.core.errors import ConfigError, RunFolderError
from rayapp.runs.folder import check_same_training

CODE: dict[str, Any] = {"name": "code", "ratio": 3, "tasks": ["sort_numbers"], "rollout": {"max_completion_tokens": 96}}
ROWS: dict[str, Any] = {
    "name": "rows",
    "tasks": ["a.parquet"],
    "agent": {"tool_file": "tools.yaml"},
    "reward": {"method": "flexible"},
    "eval": {"tasks": ["b.parquet"], "max_problems": 4, "samples_per_task": 2},
}
RUN = {"agent": {"max_assistant_turns": 3}, "reward": {"format_weight": 0.2}, "data": {"shuffle": False}}


def write(tmp_path: Path, *sources: Any, **sections: Any) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(sections | {"sources": list(sources)}))
    return path


def test_a_source_has_its_own_settings_and_else_the_runs(tmp_path: Path) -> None:
    code, rows = sources_of(load_config(write(tmp_path, CODE, ROWS, **RUN)))

    assert (code.name, code.ratio, code.config.tasks, code.config.uses_data) == ("code", 3.0, ("sort_numbers",), False)
    assert (code.config.rollout.max_completion_tokens, code.config.eval.samples_per_task) == (96, 16)
    assert (rows.name, rows.ratio, rows.config.tasks, rows.config.uses_data) == ("rows", 1.0, ("a.parquet",), True)
    assert (rows.config.rollout.max_completion_tokens, rows.config.eval.samples_per_task) == (256, 2)
    assert (rows.config.eval.tasks, rows.config.eval.max_problems) == (("b.parquet",), 4)
    assert (code.config.agent_name, rows.config.agent_name) == ("single_turn_agent", "tool_agent")
    assert (rows.config.agent.tool_file, rows.config.agent.max_assistant_turns) == ("tools.yaml", 3)
    assert (rows.config.reward.method, rows.config.reward.format_weight) == ("flexible", 0.2)
    assert (code.config.reward.method, code.config.agent.tool_file) == ("strict", "")
    assert not rows.config.data.shuffle


def test_sources_as_they_are_shown_load_to_the_same(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, CODE, ROWS, **RUN))
    (tmp_path / "shown.yaml").write_text(to_yaml(config))

    assert load_config(tmp_path / "shown.yaml") == config


def test_an_override_reaches_into_the_list(tmp_path: Path) -> None:
    path = write(tmp_path, CODE, ROWS)
    config = load_config(path, ["sources[0].ratio=5", "sources[1].agent.max_assistant_turns=9", "train.num_steps=3"])

    assert config.sources[0].ratio == 5.0
    assert config.sources[1].agent.max_assistant_turns == 9
    assert config.sources[1].agent.tool_file == "tools.yaml"
    with pytest.raises(ConfigError, match=r"'sources\[7\]\.ratio=1': the configuration has no sources\[7\]"):
        load_config(path, ["sources[7].ratio=1"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ratio": 0}, "sources[0].ratio = 0: must be a number, above 0"),
        ({"ratio": -1}, "sources[0].ratio = -1: must be a number, above 0"),
        ({"ratio": float("inf")}, "sources[0].ratio = inf: must be a number"),
        ({"name": "a/b"}, "sources[0].name = 'a/b': must be text, 1 to 63 letters"),
        ({"ratios": 2}, "unknown key sources[0].ratios; did you mean sources.ratio?"),
        ({"agent": {"max_turns": 2}}, "unknown key sources[0].agent.max_turns; did you mean sources.agent.max_assist"),
        ({"agent": {"name": "x"}}, "sources[0].agent.name = 'x': must be one of auto, tool_agent"),
        ({"agent": {"tool_file": "x"}}, "sources[0] (code): agent.tool_file is 'x', but single_turn_agent"),
        ({"rollout": {"temperature": 0.5}}, "sources[0].rollout: temperature can't be set for a source: learners"),
        ({"rollout": {"max_completion_tokens": 999}}, "above the run's rollout.max_completion_tokens = 256"),
        ({"rollout": {"group_deadline_s": 999}}, "rollout.group_deadline_s is 999, which is above the run's"),
        ({"tasks": []}, "sources[0] (code) has no tasks"),
        ({"eval": {"tasks": ["x.parquet"]}}, "data files (x.parquet) and other tasks (sort_numbers) can't"),
    ],
)
def test_what_a_source_cannot_be_is_told_with_its_place(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, CODE | changes))

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("sources", "sections", "said"),
    [
        ([CODE, CODE], {}, r"sources\[1\] \(code\): sources\[0\] has the same name"),
        ([CODE], {"tasks": ["sort_numbers"]}, "is a short form for a run with one source"),
        ([CODE], {"eval": {"tasks": ["a.parquet"]}}, "is a short form for a run with one source"),
        # The punishment of length must leave the shortest source room.
        ([CODE, ROWS], {"algorithm": {"overlong": {"buffer_tokens": 97}}},
         r"buffer_tokens is 97, but rollout\.max_completion_tokens is 96"),
    ],
)  # fmt: skip
def test_what_the_list_cannot_be_is_told(
    tmp_path: Path, sources: list[Any], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(write(tmp_path, *sources, **sections))


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("[sort_numbers, a.parquet]", r"data files \(a\.parquet, b\.parquet\).*Make two `sources`"),
        ("[sort_numbers]", r"data files \(b\.parquet\) and other tasks \(sort_numbers\).*rayapp eval"),
    ],
)
def test_tasks_beside_data_files_are_told_what_to_do(tasks: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, [f"tasks={tasks}", "eval.tasks=[b.parquet]"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_files=[a.parquet]", "data.train_files is now called tasks"),
        ("agent.task_agent=tool_agent", "agent.task_agent is now called agent.name"),
        ("sources[0].data.train_files=[a]", "sources[0].data.train_files is now called sources[0].tasks"),
    ],
)
def test_a_key_of_an_earlier_version_is_told_with_its_name_now(tmp_path: Path, override: str, said: str) -> None:
    path = write(tmp_path, CODE)

    with pytest.raises(ConfigError) as caught:
        load_config(path, [override])

    assert str(caught.value) == f"{path}: {said}"


def test_a_run_folder_with_keys_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    stored = tmp_path / "config.yaml"
    stored.write_text(yaml.safe_dump({"data": {"train_files": ["a.parquet"]}, "train": {"num_steps": 3}}))

    with pytest.raises(
        RunFolderError, match=r"older version of rayapp: its key data\.train_files is now called tasks\. Con"
    ):
        check_same_training(load_config(None, ["tasks=[a.parquet]"]), stored)


def test_a_run_goes_on_with_other_evaluation_of_its_sources_but_not_with_other_ratios(tmp_path: Path) -> None:
    stored = tmp_path / "stored.yaml"
    stored.write_text(to_yaml(load_config(write(tmp_path, CODE, ROWS))))
    path = write(tmp_path, CODE, ROWS)

    check_same_training(load_config(path, ["sources[1].eval.samples_per_task=8"]), stored)
    check_same_training(load_config(path, ["sources[1].eval.max_problems=2"]), stored)
    with pytest.raises(RunFolderError, match=r"sources\[0\]\.ratio: 3\.0 before, 1\.0 now"):
        check_same_training(load_config(path, ["sources[0].ratio=1"]), stored)


def test_a_run_of_a_version_without_a_key_goes_on_with_that_keys_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(None, ["server.kv_cache_gib=3"])
    before = config.model_dump(mode="json")
    del before["sources"], before["algorithm"]["overlong"]
    before["server"]["kv_cache_gib"] = 3  # as a version with whole GiB wrote it
    (tmp_path / "stored.yaml").write_text(yaml.safe_dump(before))

    check_same_training(config, tmp_path / "stored.yaml")
    assert not caplog.records
    with pytest.raises(RunFolderError, match=r"algorithm\.overlong\.filter: False before, True now"):
        check_same_training(load_config(None, ["algorithm.overlong.filter=true"]), tmp_path / "stored.yaml")
