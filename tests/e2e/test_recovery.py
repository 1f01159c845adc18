"""A run whose processes are killed with SIGKILL, one kind after another, in the middle of a step: it finishes whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 10
KILLS = {2: "vllm-server-0", 4: "rollout-worker-0", 6: "sandbox-pool", 8: "learner-0"}
"""After which step, which process: its next step has begun by then."""
CHECKPOINT_EVERY = 3
DEADLINE_S = 600.0


def records(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def processes(log: Path) -> dict[str, int]:
    """Process ids of the run's actors, by name, as the dashboard that it names in its output has them."""
    from ray.util.state import list_actors

    found = re.search(r"Ray dashboard: (http://[^\s]+)", log.read_text())
    assert found is not None, log.read_text()
    return {actor.name: actor.pid for actor in list_actors(found[1], filters=[("state", "=", "ALIVE")], timeout=120)}


@pytest.fixture(scope="module")
def battered(
    short_run: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, int]:
    """Run folder, output and exit code of the run."""
    folder = tmp_path_factory.mktemp("recovery")
    config = short_run(folder / "outputs", train={"num_steps": NUM_STEPS}, checkpoint={"every_steps": CHECKPOINT_EVERY})
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    run_folder, log = folder / "outputs" / "run", folder / "log"
    with log.open("wb") as output:
        driver = subprocess.Popen(
            [sys.executable, "-m", "rayapp", "train", str(folder / "config.yaml")],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
        )
        try:
            wait_for_step(driver, run_folder, 1, log)
            # Asked once and ahead: each is killed once, and an answer may take longer than a step.
            pids = processes(log)
            for step, name in KILLS.items():
                wait_for_step(driver, run_folder, step, log)
                os.kill(pids[name], signal.SIGKILL)
            driver.wait(timeout=DEADLINE_S)
        finally:
            driver.kill()
            driver.wait()
    return run_folder, log.read_text(), driver.returncode


def wait_for_step(driver: subprocess.Popen[bytes], folder: Path, step: int, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not any(record["step"] == step for record in records(folder)):
        assert driver.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"step {step} was not reached\n{log.read_text()}"
        time.sleep(0.02)


def test_the_run_finishes_with_every_step_and_every_group_once(battered: tuple[Path, str, int]) -> None:
    import pyarrow.parquet as pq

    folder, output, returncode = battered
    assert returncode == 0, output
    assert [record["step"] for record in records(folder)] == list(range(1, NUM_STEPS + 1))
    for step in range(1, NUM_STEPS + 1):
        table = pq.read_table(folder / f"trajectories/step={step:06d}.parquet", columns=["group_id", "index"])
        # Two groups a step, four trajectories each, ids in order: none was lost, none trained twice.
        expected = [(2 * (step - 1) + group, index) for group in range(2) for index in range(4)]
        assert sorted(zip(*table.to_pydict().values(), strict=True)) == expected


def test_each_loss_is_named_and_counted(battered: tuple[Path, str, int]) -> None:
    folder, output, _ = battered
    last = records(folder)[-1]
    assert last["recovery/restarts"] == 3.0, output
    assert last["recovery/learner_restarts"] == 1.0
    for name in ("vllm-server-0", "rollout-worker-0", "sandbox-pool"):
        assert f"lost {name}" in output
        assert re.search(rf"replaced {name} after [0-9.]+ s \(restart 1\)", output), output
    assert "lost the learners" in output
    assert "is issued again" in output


def test_the_ledger_balances_at_every_step(battered: tuple[Path, str, int]) -> None:
    folder, output, _ = battered
    for record in records(folder):
        states = sum(record[f"ledger/{name}"] for name in ("admitted", "ready", "training", "trained", "dropped"))
        assert states == record["ledger/issued"]
        assert record["rollout/invalid"] == 0.0, output


def test_learners_go_on_from_the_last_checkpoint(battered: tuple[Path, str, int]) -> None:
    # Lost after step 8, the last checkpoint is that of step 6: its successors' ledger begins with step 7.
    last = records(battered[0])[-1]
    assert last["ledger/trained"] == 2.0 * (NUM_STEPS - 6)
