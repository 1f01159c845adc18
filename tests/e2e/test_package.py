"""A newcomer's install and start: the wheel in an empty environment, and the project of `rayapp init`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("extra", ["view", "cpu"])
def test_the_wheel_works_in_an_empty_environment(extra: str) -> None:
    command = [sys.executable, "-m", "scripts.check_wheel", extra]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3500, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 1, done.stdout
    assert f"[{extra}] works in an empty environment" in done.stdout


@pytest.mark.e2e
def test_the_project_that_init_writes_trains_as_it_is(tmp_path: Path) -> None:
    """As a user does it: init, then make, with two of its twenty steps."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["RAY_ADDRESS"] = "local"  # not a Ray of other tests that still runs

    def run(*command: str, folder: Path) -> str:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3000, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("rayapp", "init", "mine", folder=tmp_path)
    project = tmp_path / "mine"
    assert "can run on this machine" in run("make", "try", folder=project)
    run("make", "train", "ARGS=train.num_steps=2 train.profile_steps=[2]", folder=project)

    trained = project / "outputs" / "mine"
    steps = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(f"source/{source}/reward/mean" in step for step in steps for source in ("code", "rows"))
    assert all(step["rollout/invalid"] == 0 for step in steps)
    assert (trained / "final" / "model.safetensors").exists()

    for process in ("vllm-server-0", "learner-0"):
        assert (trained / "profiles" / "step=000002" / f"{process}.json.gz").stat().st_size > 1000
