"""What a replay reads, refuses and compares; tests/e2e/test_resume.py tests that it repeats a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.driver.replay import Difference, apart_from, differences, recorded_metrics, report_lines, trajectory_files


def recorded(folder: Path, *steps: int) -> Path:
    (folder / "trajectories").mkdir()
    for step in steps:
        (folder / "trajectories" / f"step={step:06d}.parquet").touch()
    return folder


def test_steps_are_replayed_in_order_and_no_more_than_the_config_takes(tmp_path: Path) -> None:
    files = trajectory_files(recorded(tmp_path, 3, 1, 2, 10, 4, 5, 6, 7, 8, 9), num_steps=9)
    assert [file.stem for file in files] == [f"step={step:06d}" for step in range(1, 10)]


def test_a_folder_without_trajectories_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no trajectories.*tracking\.trajectories: true"):
        trajectory_files(tmp_path, num_steps=5)


def test_a_missing_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no trajectories of the steps 2, 4"):
        trajectory_files(recorded(tmp_path, 1, 3, 5), num_steps=5)


def test_a_run_that_was_killed_while_it_wrote_a_line_is_compared_with_the_lines_before(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n{"step": 2, "rew')
    assert recorded_metrics(tmp_path) == {1: {"step": 1, "reward/mean": 0.5}}


def test_a_replay_never_writes_over_the_run_that_it_replays(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"output_dir": str(tmp_path), "name": "first"}})
    assert apart_from(config, tmp_path / "first").run.name == "first-replay"
    assert apart_from(config, tmp_path / "other").run.name == "first"


def test_one_bit_is_a_difference_and_a_clock_is_not() -> None:
    one, next_to_one = 1.0, 1.0 + 2**-52
    before = {
        "learner/loss": one,
        "learner/lr": 0.5,
        "timing_s/step": 3.0,
        "learner/gone": 1.0,
        "learner/nan": float("nan"),
    }
    now = {"learner/loss": next_to_one, "learner/lr": 0.5, "timing_s/step": 4.0, "learner/nan": float("nan")}
    count, found = differences(7, before, now)
    assert count == 3  # loss, lr and nan: times, and metrics of only one side, are left out
    assert found == [Difference(step=7, name="learner/loss", recorded=one, replayed=next_to_one)]
    assert list(report_lines(count, found))[1] == f"  step 7 learner/loss: 1.0 recorded, {next_to_one!r} now"
    assert list(report_lines(3, [])) == ["replayed: all 3 metrics equal the recorded ones to the last bit"]
