"""Output of a run for people and their tools: step metrics, metrics.jsonl, both consoles, rewards.png.

The trajectory files have their own tests in test_trajectories.py.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rayapp.core.types import FloatArray, GroupSummary
from rayapp.runs.plots import write_reward_plot
from rayapp.runs.tracking.console import (
    LEGEND,
    LineConsole,
    LiveConsole,
    step_line,
)
from rayapp.runs.tracking.metrics import JsonlTracker, MismatchWatch, read_metrics, summarize_step, warning_of
from rayapp.runs.tracking.trackers import RunTracker
from support import make
from support.timing import wait_until

ROOT = Path(__file__).parents[3]
METRICS = {
    "reward/mean": -0.25,
    "reward/pass_rate/mean": 0.5,
    "reward/solved/mean": 0.125,
    "groups/zero_variance": 0.5,
    "learner/entropy": 1.5,
    "staleness/max": 1.0,
    "throughput/response_tokens_per_s": 230.7,
    "timing_s/step": 12.0,
}


def summary(rewards: Sequence[float] | FloatArray = (1, 0), **changes: object) -> GroupSummary:
    """Two trajectories of task `sort`, rewards 1 and 0, both valid, sampled by version 3."""
    usual: dict[str, object] = {
        "task": "sort",
        "num_tokens": np.array([15, 25], np.int32),
        "num_response_tokens": np.array([5, 15], np.int32),
        "num_prompt_tokens": 10,
        "statuses": ("completed", "truncated"),
        "reward_statuses": ("scored", "timeout"),
        "reward_terms": {"pass_rate": np.array([1, 0], np.float32)},
        "min_policy_version": 3,
    }
    return make.summary(rewards, **usual | changes)


def test_rewards_are_those_of_valid_trajectories_of_all_groups_and_of_each_task() -> None:
    other = summary(task="sum", rewards=np.array([0.5, 9], np.float32), valid=np.array([True, False]))

    metrics = summarize_step([summary(), other], version=3)

    assert metrics["reward/mean"] == pytest.approx(0.5)  # (1 + 0 + 0.5) / 3; the 9 is not valid
    assert metrics["reward/std"] == pytest.approx(np.std([1, 0, 0.5]))
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["task/sort/reward/mean"] == 0.5
    assert metrics["task/sum/reward/mean"] == 0.5


def test_each_source_has_its_rewards_its_groups_without_signal_and_its_lengths() -> None:
    code = make.summary([1.0, 0.0], source="code", reward_terms={"solved": np.array([1, 0], np.float32)})
    rows = make.summary([0.5, 0.5], source="rows", num_response_tokens=np.array([7, 9], np.int32))

    metrics = summarize_step([code, rows], version=0)

    assert (metrics["source/code/reward/mean"], metrics["source/rows/reward/mean"]) == (0.5, 0.5)
    assert metrics["source/code/reward/solved/mean"] == 0.5
    assert (metrics["source/code/groups/zero_variance"], metrics["source/rows/groups/zero_variance"]) == (0.0, 1.0)
    assert metrics["source/rows/length/response/mean"] == 8.0
    assert metrics["groups/zero_variance"] == 0.5


def test_a_term_that_only_some_trajectories_have_is_averaged_over_those() -> None:
    partial = summary(reward_terms={"style": np.array([0.25, np.nan], np.float32)})

    metrics = summarize_step([summary(), partial], version=3)

    assert metrics["reward/style/mean"] == 0.25
    assert metrics["reward/pass_rate/mean"] == 0.5  # of the first group: the second has no such term


def test_verdicts_that_could_be_forged_are_counted_and_no_reward() -> None:
    some = make.summary([1.0, 0.0], reward_terms={"verdict/forgeable": np.array([1.0, np.nan], np.float32)})

    metrics = summarize_step([some, some], version=0)

    assert metrics["verdict/forgeable"] == 2.0
    assert "reward/verdict/forgeable/mean" not in metrics
    assert "turns/mean" not in metrics


def test_groups_that_teach_nothing_are_counted_by_their_reason() -> None:
    equal = summary(rewards=np.array([0.5, 0.5], np.float32))
    only_one_valid = summary(valid=np.array([True, False]))
    none_valid = summary(valid=np.array([False, False]))

    metrics = summarize_step([summary(), equal, only_one_valid, none_valid], version=3)

    assert metrics["groups/count"] == 4
    assert metrics["groups/zero_variance"] == 0.5  # the equal ones, and one alone differs from nothing
    assert metrics["groups/all_invalid"] == 0.25


def test_a_step_without_a_valid_reward_has_no_reward_metric_rather_than_zero() -> None:
    metrics = summarize_step([summary(valid=np.array([False, False]))], version=3)

    assert not [key for key in metrics if key.startswith(("reward/", "task/"))]
    assert metrics["rollout/invalid"] == 1.0


def test_statuses_are_shares_of_all_trajectories_and_staleness_counts_optimizer_steps() -> None:
    stale = summary(failure_kinds=("", "sandbox_gone"), min_policy_version=1)

    metrics = summarize_step([summary(), stale], version=3)

    assert (metrics["status/completed"], metrics["status/truncated"]) == (0.5, 0.5)
    assert metrics["reward_status/timeout"] == 0.5
    assert metrics["failure/sandbox_gone"] == 0.25
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.0, 2.0)  # 0 and 3 - 1
    assert (metrics["tokens/response"], metrics["tokens/total"]) == (40, 80)


def test_tokens_that_a_trajectory_kept_over_a_sync_are_counted() -> None:
    # One began with version 1 and went on with 2; the others were sampled whole, by 2 and by 1.
    partial = summary(tokens_by_version=({1: 30, 2: 10}, {2: 20}))
    old = summary(tokens_by_version=({1: 20}, {}))

    metrics = summarize_step([partial, old], version=2)

    assert metrics["kept/trajectories"] == pytest.approx(1 / 3)
    assert metrics["kept/tokens"] == 30 / 80
    assert metrics["staleness/token_mean"] == 50 / 80


def test_metrics_are_one_json_line_a_step_without_what_is_not_a_number(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"b/two": 2.0, "a/one": float("nan"), "c": np.float32(0.5)})  # type: ignore[dict-item]
    tracker.log(2, {"b/two": 3.0})
    tracker.close()

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()

    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert {key: first[key] for key in first if key != "time"} == {"step": 1, "b/two": 2.0, "c": 0.5}
    assert second["b/two"] == 3.0


def test_lines_of_metrics_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_metrics(file) == []
    file.write_bytes(b'{"step": 1}\n{"step": 2, "re\xff\n7\n{"reward/mean": 1}\n{"step": 2}\n{"step": 3, "rew')

    assert [record["step"] for record in read_metrics(file)] == [1, 2]


ON_GPUS = {
    "throughput/tokens_per_s_per_gpu": 1234.0, "eval/trajectories/scored": 637.0, "eval/reward/mean": 0.5,
    "eval/trajectories/failed": 3.0, "eval/prompts/left_out": 2.0,
}  # fmt: skip


WHOLE_LINE = (
    "step   7/150  reward -0.250  pass rate 0.50  solved 0.12  no signal  50%  entropy 1.50  stale 1"
    "  tokens/s  231  seconds 12.0  left 29 min"
)
EMPTY_LINE = (
    "step   7/150  reward      -  pass rate    -  solved    -  no signal    -  entropy    -  stale -"
    "  tokens/s    -  seconds    -  left -"
)


@pytest.mark.parametrize(
    ("step", "metrics", "seconds_left", "said"),
    [
        (7, METRICS, 1716.0, WHOLE_LINE),
        (7, {}, None, EMPTY_LINE),
        (0, {"eval/reward/mean": 0.25}, None, "step   0/150  eval reward +0.250  eval solved    -  left -"),
        (2, METRICS | ON_GPUS, 7500.0, "tokens/s/GPU 1234"),
        (2, METRICS | ON_GPUS, 7500.0, "eval scored  637  eval failed    3  eval prompts left out    2"),
        (2, METRICS | ON_GPUS, 7500.0, "left 2 h 05 min"),
    ],
)
def test_a_step_line_has_the_numbers_that_a_person_reads(
    step: int, metrics: dict[str, float], seconds_left: float | None, said: str
) -> None:
    assert said in step_line(step, 150, metrics, seconds_left=seconds_left)


def test_a_run_that_is_silent_says_what_it_waits_for_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayapp.runs.tracking.console.FIRST_SILENCE_S", 0.0)
    stream = io.StringIO()
    console = LineConsole(4, stream)
    console.phase("rollout")
    console.progress("2 groups with 16 completions done, 6 in generation")
    wait_until(lambda: "in generation" in stream.getvalue())
    console.close()

    assert re.match(r"step 1: rollout \d s, 2 groups with 16 completions done, 6 in generation\n", stream.getvalue())


def test_on_eighty_columns_the_time_left_stays_in_one_piece() -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=80, height=30, color_system=None)
    live = LiveConsole(150, "a-run-with-a-rather-long-name-of-its-own", terminal, clock=lambda: 0.0)
    live.log(1, METRICS | {"timing_s/step": 83.0})
    terminal.print(live._render())
    live.close()

    assert "left 3 h 26 min" in stream.getvalue()
    assert all(len(line) <= 80 for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines())


def test_the_time_left_is_the_mean_of_the_last_steps_times_the_steps_left() -> None:
    stream = io.StringIO()
    console = LineConsole(4, stream)
    console.log(1, METRICS | {"timing_s/step": 10.0})
    console.log(2, METRICS | {"timing_s/step": 20.0})

    legend, *lines = stream.getvalue().splitlines()
    assert legend == LEGEND  # once, before the first step
    lefts = [line.split("left ")[1] for line in lines]

    assert lefts == ["30 s", "30 s"]  # 3 steps of 10 s; 2 steps of 15 s


def test_the_live_display_shows_step_phase_reward_and_time_left() -> None:
    stream, now = io.StringIO(), [100.0]
    terminal = Console(file=stream, force_terminal=True, width=120, height=30, color_system=None)
    live = LiveConsole(3, "my-run", terminal, clock=lambda: now[0])
    live.note("Ray dashboard: http://127.0.0.1:8265")
    live.log(1, METRICS)
    live.phase("rollout")
    now[0] = 107.0
    terminal.print(live._render())

    picture = stream.getvalue()
    live.close()

    for text in ("my-run", "step 1/3   rollout 7 s   left 24 s", "-0.250", "pass rate 0.50", "tokens/s 231"):
        assert text in picture, picture
    assert "Ray dashboard: http://127.0.0.1:8265" in picture
    assert "stopped" in stream.getvalue()  # closed after 1 of 3 steps


def test_notes_may_arrive_while_the_thread_of_the_display_redraws() -> None:
    live = LiveConsole(3, "my-run", Console(file=io.StringIO(), force_terminal=True), is_live=False)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # the threads change places inside of every loop
    try:
        with ThreadPoolExecutor(1) as pool:
            noted = pool.submit(lambda: [live.note(str(number)) for number in range(300)])
            while not noted.done():
                live._render()
            noted.result()
    finally:
        sys.setswitchinterval(interval)


PROGRAM = """
import logging, sys
from pathlib import Path
from rayapp.config.config import Config
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.trackers import make_trackers

config = Config.model_validate({"run": {"output_dir": sys.argv[1], "name": "shown"}, "train": {"num_steps": 2}})
with RunFolder.open(config) as folder, make_trackers(config, folder) as tracker:
    tracker.note("Ray dashboard: http://127.0.0.1:8265")
    for step in (1, 2):
        tracker.phase("rollout")
        print(f"a library prints {step}")
        tracker.log(step, {"reward/mean": 0.5, "timing_s/step": 1.0})
"""


def test_in_a_pipe_every_step_is_one_plain_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)

    lines = done.stdout.splitlines()

    assert lines[0] == "Ray dashboard: http://127.0.0.1:8265"
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == ["step 1/2", "step 2/2"]
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_on_a_terminal_the_display_is_redrawn_in_place_and_its_last_picture_stays(tmp_path: Path) -> None:
    output = in_terminal([sys.executable, "-c", PROGRAM, str(tmp_path)])

    above, _, last = output.rpartition("\x1b[1A\x1b[2K")  # one line up, and cleared
    assert "a library prints 2\r\n" in above  # and what others print moves up instead of tearing the picture
    assert "step 2/2   done" in last
    assert "left 0 s" in last
    assert output.endswith("\x1b[?25h")  # the cursor is back


def in_terminal(command: list[str]) -> str:
    """Return a command's output in a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    output = b""
    try:
        while chunk := os.read(ours, 65536):
            output += chunk
    except OSError:  # Linux reports the end of a terminal's other side as an error
        pass
    finally:
        os.close(ours)
    assert process.wait(timeout=240) == 0, output.decode()
    return output.decode()


class BrokenTracker:
    """A tracker whose disk or service is gone."""

    def log(self, step: int, metrics: object) -> None:
        raise OSError("no route to host")

    def close(self) -> None:
        raise OSError("no route to host")


def test_a_tracker_that_fails_never_stops_training_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    healthy = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker = RunTracker({"broken": BrokenTracker(), "jsonl": healthy}, None)
    tracker.log(1, {})
    tracker.log(2, {})
    tracker.log(3, {})
    tracker.close()

    counts = [record["tracking/failed"] for record in read_metrics(tmp_path / "metrics.jsonl")]

    assert counts == [0.0, 1.0, 2.0]
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["tracker broken failed and may miss steps from now on: OSError: no route to host"]  # once


def test_a_console_whose_reader_has_gone_never_stops_training(tmp_path: Path) -> None:
    """`rayapp train | head -1`: every later write fails with a broken pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    console = LineConsole(3, os.fdopen(writing, "w"))
    tracker = RunTracker({"console": console, "jsonl": JsonlTracker(tmp_path / "metrics.jsonl")}, console)
    tracker.note("Ray dashboard: http://127.0.0.1:8265")
    tracker.phase("rollout")
    tracker.log(1, METRICS)
    tracker.close()

    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_the_plot_is_a_picture_of_what_was_logged(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 8):
        tracker.log(step, METRICS | {"task/sort/reward/mean": step / 10, "reward/std": 0.1})
    tracker.log(8, {"timing_s/step": 1.0})  # a step without a valid reward leaves a gap, no fall to zero

    write_reward_plot(tmp_path)

    data = (tmp_path / "rewards.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
    (tmp_path / "rewards.png").unlink()
    (tmp_path / "rewards.png").mkdir()
    with pytest.raises(IsADirectoryError):
        write_reward_plot(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "rewards.png"], "nothing half-written"


def test_a_run_without_signal_warns_once_and_says_so_again_when_it_ends() -> None:
    stream = io.StringIO()
    tracker = RunTracker({}, LineConsole(9, stream))
    silent, good = {"learner/share_computed": 0.0}, {"learner/share_computed": 0.5}

    for step, metrics in enumerate([silent, silent, good, silent, silent, silent, silent], 1):
        tracker.log(step, metrics)
    during = stream.getvalue()
    tracker.close()

    assert during.count("warning: no signal in the last 3 steps") == 1
    assert "warning: 6 of 7 steps had no signal" in stream.getvalue().removeprefix(during)


WITH_KL = {"learner/share_computed": 1.0, "reward/std": 0.0}
"""A step whose rewards are all equal, although a KL is computed."""


@pytest.mark.parametrize(
    ("steps", "is_warned"),
    [
        ([{"learner/share_computed": 0.0}] * 3, True),
        ([*[{"learner/share_computed": 0.0}] * 3, {"learner/share_computed": 0.1}], False),
        ([{"learner/share_computed": 0.0}] * 2, False),
        ([WITH_KL] * 3, True),
        ([WITH_KL | {"distillation/kl": 0.5}] * 3, False),  # the teacher teaches
    ],
)
def test_the_page_warns_while_the_last_steps_have_no_signal(steps: list[dict[str, float]], is_warned: bool) -> None:
    assert bool(warning_of([{"step": 0.0}, *steps])) == is_warned


def test_a_difference_between_engine_and_learner_that_grows_after_a_sync_is_said_once() -> None:
    watch = MismatchWatch()

    told = [watch.record({"rollout_probs_diff/mean": each, "staleness/max": 0.0}) for each in (1e-7, 1e-6, 0.035, 0.05)]

    assert [bool(text) for text in told] == [False, False, True, False]
    assert "0.035" in told[2]


def test_differences_in_bfloat16_and_on_groups_of_older_versions_are_no_news() -> None:
    rounded, stale = MismatchWatch(), MismatchWatch()

    assert not any(rounded.record({"rollout_probs_diff/mean": each}) for each in (0.0066, 0.0066, 0.009))
    assert not any(
        stale.record({"rollout_probs_diff/mean": each, "staleness/max": lag}) for each, lag in ((1e-7, 0.0), (0.1, 1.0))
    )
