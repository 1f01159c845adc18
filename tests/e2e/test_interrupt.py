"""Ctrl-C on a terminal, in the middle of a step: exit code 130, nothing left running, and a run that can go on."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.config.config import Config
from rayapp.runs.folder import RunFolder

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 1200.0
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


def test_ctrl_c_in_the_middle_of_a_step_leaves_nothing_running_and_a_whole_checkpoint(
    tmp_path: Path,
    short_run: Callable[..., dict[str, Any]],
    descendants: Callable[[], dict[int, str]],
    settled: Callable[..., dict[int, str]],
) -> None:
    config = short_run(tmp_path, train={"num_steps": 1_000_000, "groups_per_step": 2})
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    terminal = Terminal([sys.executable, "-m", "rayapp", "train", str(file)])
    try:
        wait_for_step(terminal, tmp_path / "run", 3)
        running = descendants()
        terminal.press(CTRL_C)
        code = terminal.process.wait(timeout=120)
    finally:
        terminal.close()

    assert code == 130, terminal.output
    assert "Traceback" not in terminal.output
    assert any("ray::vllm-server-0" in line or "ray::VllmServer" in line for line in running.values()), running
    assert settled(descendants) == {}
    assert "Ray dashboard: http://" in terminal.output
    assert "step 3/1000000" in terminal.output
    assert "stopped" in terminal.output
    with RunFolder.open(Config.model_validate(config)) as folder:
        checkpoint = folder.latest_checkpoint()
        assert checkpoint is not None
        assert checkpoint.version >= 2
        assert checkpoint.next_group_id == 2 * checkpoint.version  # two groups a step, none lost


def wait_for_step(terminal: Terminal, folder: Path, step: int) -> None:
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + DEADLINE_S
    while not metrics.exists() or metrics.read_text().count("\n") < step:
        assert terminal.process.poll() is None, terminal.output
        assert time.monotonic() < deadline, f"step {step} was not reached: {terminal.output}"
        time.sleep(0.02)
