"""A run that is killed goes on as if nothing had happened: same tokens, same metrics, to the last bit. And Ctrl-C on
its terminal, in the middle of a step: exit code 130, nothing left running, and a run that can go on.

The steps between what was saved and the kill are taken twice: before it, by processes that nothing had interrupted, and
after it, by others. The second time must be the first."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rayapp.config.loading import load_config
from rayapp.runs.folder import RunFolder
from support.whole_runs import lives, records, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
SAVED, NUM_STEPS = 4, 7
"""The run is killed inside the step behind NUM_STEPS; SAVED is the last step that it has saved then."""
MANY_STEPS = 1_000_000
DEADLINE_S = 1500.0
"""Of one run, for one that hangs: on a machine that others keep busy the actors' start alone takes minutes."""
STOP_S = 120.0

CTRL_C = b"\x03"
# Ctrl-C reaches every process of the job that the terminal is controlled by, Ray's among them.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A command that runs in a terminal of its own, which it controls as a shell's foreground job does."""

    def __init__(self, command: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        self._written = bytearray()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "30"},
            start_new_session=True,
        )
        os.close(theirs)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._ours, 65536):
                self._written += chunk
        except OSError:  # Linux reports the end of a terminal's other side as an error
            return

    @property
    def output(self) -> str:
        """All it wrote, without colours and cursor movements."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self._written.decode(errors="replace"))

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reading.join(10.0)
        os.close(self._ours)


@pytest.fixture(scope="module")
def config_file(short_run: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    config = short_run(
        folder,
        run={"output_dir": str(folder / "outputs"), "deterministic": True},
        cluster={"device": "cpu", "dashboard": False},
        train={"num_steps": MANY_STEPS},
        checkpoint={"every_steps": SAVED, "keep_last": 100},
        eval={"samples_per_task": 3, "every_steps": 2},
    )
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def train(config_file: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    return rayapp("train", str(config_file), f"run.name={name}", *overrides)


def rayapp(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rayapp", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def run_folder(config_file: Path, name: str) -> Path:
    return config_file.parent / "outputs" / name


def num_steps(folder: Path) -> int:
    """What `records` has, for those who ask fifty times a second."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # it ends its actors, which nobody else would
        output, _ = process.communicate(timeout=STOP_S)
    assert process.returncode == 0, output
    return output


@dataclass(frozen=True)
class Killed:
    """A run whose driver was killed with SIGKILL inside step NUM_STEPS + 1; its engine is gone."""

    folder: Path
    """Where it goes on."""
    before: Path
    """What it had left by then: steps that nothing had interrupted since the first."""


@dataclass(frozen=True)
class Interrupted:
    """A run that ended by Ctrl-C."""

    folder: Path
    returncode: int
    output: str
    ran: dict[int, str]
    """Its processes when the key was pressed, by id: their command lines."""
    left: dict[int, str]
    """Those of them that nothing ends any more."""


@pytest.fixture(scope="module")
def killed(config_file: Path) -> Killed:
    folder, before = run_folder(config_file, "killed"), config_file.parent / "before"
    process = train(config_file, "killed")
    try:
        told = lambda: process.communicate()[0]  # noqa: E731
        wait_until(lambda: num_steps(folder) >= NUM_STEPS, process, told, timeout_s=DEADLINE_S)
        started = psutil.Process(process.pid).children(recursive=True)
        engines = [child for child in started if "VLLM" in name_of(child)]
        assert engines, started
        assert "/torch/lib/" in libraries(engines)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    # An engine whose server has died ends its parent, which would be this process once `descendants` adopts orphans.
    deadline = time.monotonic() + STOP_S
    while any(lives(engine) for engine in engines):
        assert time.monotonic() < deadline, engines
        time.sleep(0.1)
    shutil.copytree(folder, before)  # now, as nothing of the run writes there any more
    return Killed(folder, before)


def name_of(process: psutil.Process) -> str:
    """Empty if it has ended: executions in sandboxes come and go."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def libraries(processes: list[psutil.Process]) -> str:
    """What is mapped into their memory."""
    return "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)


GOES_ON = ("eval.every_steps=3", "checkpoint.every_steps=2", "cluster.dashboard=true")
"""Of the run that goes on: evaluated and saved after step 6, unlike the one that was killed, and with a dashboard."""


@pytest.fixture(scope="module")
def interrupted(
    config_file: Path,
    killed: Killed,
    descendants: Callable[[], dict[int, str]],
    settled: Callable[..., dict[int, str]],
) -> Interrupted:
    """The killed run, started again in a terminal: it goes on behind step SAVED, and Ctrl-C is pressed inside step
    NUM_STEPS + 1 or later. From here on the file's runs are of forked processes: the first one was started as a user's
    is, and these must do what it did."""
    folder = killed.folder
    terminal = Terminal([sys.executable, "-m", "rayapp", "train", str(config_file), "run.name=killed", *GOES_ON])
    try:
        deadline = time.monotonic() + DEADLINE_S
        # "resumed" is said when the steps to be taken again are gone from the folder.
        while "resumed from step" not in terminal.output or num_steps(folder) < NUM_STEPS:
            assert terminal.process.poll() is None, terminal.output
            assert time.monotonic() < deadline, f"step {NUM_STEPS} was not reached: {terminal.output}"
            time.sleep(0.02)
        ran = descendants()
        terminal.press(CTRL_C)
        code = terminal.process.wait(timeout=STOP_S)
    finally:
        terminal.close()
    return Interrupted(folder, code, terminal.output, ran, settled(descendants))


def deterministic(record: dict[str, float]) -> dict[str, float]:
    """What comes from training, and neither measures the clock nor what is in flight or waiting at one moment."""
    others = ("timing_s/", "throughput/", "weight_sync/", "time", "eval/", "routing/", "queue/oldest_ready_s")
    return {key: value for key, value in record.items() if not key.startswith(others)}


def evaluation(record: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in record.items() if key.startswith("eval/")}


def test_a_run_leaves_one_line_of_metrics_a_step_and_writes_the_letter_that_pays_more_often(killed: Killed) -> None:
    found = records(killed.before)
    rewards = [record["reward/mean"] for record in found]

    assert [record["step"] for record in found] == list(range(1, NUM_STEPS + 1))
    assert sum(rewards[-2:]) > sum(rewards[:2])


def test_ctrl_c_in_the_middle_of_a_step_leaves_nothing_running_and_a_whole_checkpoint(
    config_file: Path, interrupted: Interrupted
) -> None:
    assert interrupted.returncode == 130, interrupted.output
    assert "Traceback" not in interrupted.output
    ran = interrupted.ran.values()
    assert any("ray::vllm-server-0" in line or "ray::VllmServer" in line for line in ran), ran
    assert interrupted.left == {}
    assert "Ray dashboard: http://" in interrupted.output
    assert f"step {NUM_STEPS}/{MANY_STEPS}" in interrupted.output
    assert "stopped" in interrupted.output
    config = load_config(config_file, ["run.name=killed"])
    with RunFolder.open(config) as folder:
        checkpoint = folder.checkpoints.latest()
        assert checkpoint is not None
        assert checkpoint.version >= NUM_STEPS
        assert checkpoint.next_group_id == 2 * checkpoint.version  # two groups a step, none lost


def again(folder: Path) -> list[dict[str, float]]:
    """Records of the steps that were taken once before the kill, and once after it from what was saved."""
    return [record for record in records(folder) if SAVED < record["step"] <= NUM_STEPS]


def test_a_killed_run_goes_on_with_the_metrics_that_it_had(killed: Killed, interrupted: Interrupted) -> None:
    expected = [deterministic(record) for record in again(killed.before)]
    found = [deterministic(record) for record in again(interrupted.folder)]
    assert [record["step"] for record in found] == [record["step"] for record in expected] != []
    ledger = {key for record in expected for key in record if key.startswith("ledger/")}  # counts from the resume on
    for one, other in zip(found, expected, strict=True):
        assert {k: v for k, v in one.items() if k not in ledger} == {k: v for k, v in other.items() if k not in ledger}
    # The steps before are those of before, and none is there twice.
    assert records(interrupted.folder)[:SAVED] == records(killed.before)[:SAVED]
    assert [record["step"] for record in records(interrupted.folder)][:NUM_STEPS] == list(range(1, NUM_STEPS + 1))


def test_training_is_evaluated_when_asked_on_weights_that_are_the_same_after_a_resume(
    killed: Killed, interrupted: Interrupted
) -> None:
    expected, found = (
        {int(record["step"]): evaluation(record) for record in records(folder)[:NUM_STEPS] if evaluation(record)}
        for folder in (killed.before, interrupted.folder)
    )
    assert list(expected) == list(found) == [2, 4, 6]
    assert expected[6] == found[6]
    assert {"eval/reward/mean", "eval/task/first/reward/mean", "eval/task/second/reward/mean"} <= expected[6].keys()
    assert expected[6]["eval/groups/count"] == 2.0
    assert expected[6]["eval/staleness/max"] == 0.0


@pytest.mark.long
@pytest.mark.parametrize("step", [SAVED, SAVED + 2])
def test_the_eval_command_finds_of_a_checkpoint_what_the_run_itself_found(
    config_file: Path, interrupted: Interrupted, step: int
) -> None:
    checkpoint = interrupted.folder / "checkpoints" / f"step={step:06d}"

    output = finish(rayapp("eval", str(config_file), "--model", str(checkpoint)))

    found = json.loads(output[output.rindex("\n{\n") :])
    expected = {
        key.removeprefix("eval/"): value for key, value in evaluation(records(interrupted.folder)[step - 1]).items()
    }
    assert {"pass_at_1/first", "pass_at_2/first", "pass_at_3/second", "pass_prompts/first"} <= expected.keys()
    assert found == expected


def test_a_killed_run_samples_the_same_tokens_again(killed: Killed, interrupted: Interrupted) -> None:
    import pyarrow.parquet as pq

    columns = ["group_id", "index", "token_ids", "rollout_log_probs", "reward"]
    for step in range(SAVED + 1, NUM_STEPS + 1):
        name = f"trajectories/step={step:06d}.parquet"
        before, after = (
            pq.read_table(folder / name, columns=columns) for folder in (killed.before, interrupted.folder)
        )
        assert before.equals(after)


def test_nothing_of_a_killed_run_is_left_running(interrupted: Interrupted) -> None:
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"run.name={interrupted.folder.name}" not in left
    assert not list(Path("/dev/shm").glob("rayapp-weights-*"))
