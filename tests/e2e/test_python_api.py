"""A whole run from Python, as a notebook makes it: with objects of the program, inside a running event loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayapp.runs.tracking.metrics import read_metrics

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "data" / "train_from_python.py"


@pytest.mark.long
def test_a_run_with_a_task_of_the_program_stops_and_goes_on_leaving_nothing_behind(
    tiny_model: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tiny_model), str(tmp_path)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["stopped_after"] == 2
    assert said["has_model"]
    assert said["failed_with"] == "no more of this"
    assert said["left"] == []
    metrics = read_metrics(tmp_path / "outputs" / "mine" / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    assert "task/letters/reward/mean" in metrics[0], "the program's own task scored in the workers"
