"""Runs whose processes are killed with SIGKILL, one kind after another, in the middle of a step: they finish whole.

The real vLLM and FSDP; tests/cluster/test_recovery.py has more kinds of loss, with stand-ins.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.whole_runs import records, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS = 5
CHECKPOINT_EVERY = 2
REPLACED = {1: "vllm-server-0", 3: "rollout-worker-0"}
BEGUN_AGAIN = {1: "sandbox-pool", 3: "learner-0"}
ONE_RANK_OF_FOUR = {1: "vllm-server-1", 3: "learner-2"}
"""After which step, which process: its next step has begun by then."""
SMALL: dict[str, Any] = {}
EIGHT_GPUS = {"server": {"num_servers": 2, "tensor_parallel_size": 2, "kv_cache_gib": 0.1, "cpu_threads": 1}}
"""Half of the seeds' topology, FSDP on 8 learners and servers of two ranks; the whole needs some 30 GiB."""
RUNS = [(REPLACED, SMALL, 1), (BEGUN_AGAIN, SMALL, 1), (ONE_RANK_OF_FOUR, EIGHT_GPUS, 4)]
DEADLINE_S = 600.0
Battered = tuple[Path, str, int, dict[int, str]]
"""Run folder, output and exit code of a run, and what was killed."""


def has_trained(folder: Path, step: int) -> bool:
    return any(record["step"] == step for record in records(folder))


def processes(log: Path) -> dict[str, int]:
    """Process ids of the run's actors, by name, as the dashboard that it names in its output has them."""
    found = re.search(r"Ray dashboard: (http://[^\s]+)", log.read_text())
    assert found is not None, log.read_text()
    # Not ray.util.state: in one process it stays with the first Ray that it was asked about.
    with urllib.request.urlopen(f"{found[1]}/api/v0/actors", timeout=120) as answer:
        actors = json.load(answer)["data"]["result"]["result"]
    return {actor["name"]: actor["pid"] for actor in actors if actor["state"] == "ALIVE"}


@pytest.fixture(scope="module", params=RUNS, ids=[" ".join(run[0].values()) for run in RUNS])
def battered(
    request: pytest.FixtureRequest, short_run: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Battered:
    kills: dict[int, str]
    kills, sections, num_learners = request.param
    folder = tmp_path_factory.mktemp("recovery")
    config = short_run(
        folder / "outputs", train={"num_steps": NUM_STEPS}, checkpoint={"every_steps": CHECKPOINT_EVERY}, **sections
    )
    config["learner"]["num_learners"] = num_learners
    num_processes = 2 + num_learners + config["server"].get("num_servers", 1)
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
            wait_until(lambda: log.read_text().count("ready: ") == num_processes, driver, log.read_text)
            # Asked once and ahead: each is killed once, and an answer may take longer than a step.
            pids = processes(log)
            for step, name in kills.items():
                wait_until(partial(has_trained, run_folder, step), driver, log.read_text)
                os.kill(pids[name], signal.SIGKILL)
            driver.wait(timeout=DEADLINE_S)
        finally:
            driver.kill()
            driver.wait()
    return run_folder, log.read_text(), driver.returncode, kills


def test_a_run_whose_processes_are_killed_finishes_with_every_step_and_every_group_once(battered: Battered) -> None:
    import pyarrow.parquet as pq

    folder, output, returncode, kills = battered
    assert returncode == 0, output
    assert [record["step"] for record in records(folder)] == list(range(1, NUM_STEPS + 1))
    for step in range(1, NUM_STEPS + 1):
        table = pq.read_table(folder / f"trajectories/step={step:06d}.parquet", columns=["group_id", "index"])
        # Two groups a step, four trajectories each, ids in order: none was lost, none trained twice.
        expected = [(2 * (step - 1) + group, index) for group in range(2) for index in range(4)]
        assert sorted(zip(*table.to_pydict().values(), strict=True)) == expected
    for record in records(folder):
        states = sum(record[f"ledger/{name}"] for name in ("admitted", "ready", "training", "trained", "dropped"))
        assert states == record["ledger/issued"]
        assert record["rollout/invalid"] == 0.0, output
    # A learner lost after step 3, the last checkpoint is that of step 2: its successors' ledger begins with step 3.
    before = 2 if "learner" in kills[3] else 0
    assert records(folder)[-1]["ledger/trained"] == 2.0 * (NUM_STEPS - before)


def test_each_loss_is_counted_and_one_line_on_the_console(battered: Battered) -> None:
    folder, output, _, kills = battered
    replaced = [name for name in kills.values() if not name.startswith("learner")]
    last = records(folder)[-1]
    assert last["recovery/restarts"] == len(replaced), output
    assert last["recovery/learner_restarts"] == len(kills) - len(replaced)
    for name in replaced:
        assert re.search(rf"replaced {name} after [0-9.]+ s \(restart 1\)", output), output
    assert ("replaced the learners after" in output) == (len(replaced) < len(kills))
    if "vllm-server-1" not in kills.values():  # the other server takes its requests
        assert "is issued again" in output
    assert "Traceback" not in output, output
    assert "\x1b[" not in output, output
    for name in kills.values():
        lost = "lost the learners" if name.startswith("learner") else f"lost {name}"
        assert sum(lost in line for line in output.splitlines()) == 1, output


def test_every_rank_of_every_server_held_the_learners_weights_in_each_step(battered: Battered) -> None:
    from safetensors import safe_open

    folder, output, _, kills = battered
    with safe_open(folder / "final" / "model.safetensors", "pt") as file:
        num_tensors = len(file.keys())
    for record in records(folder):
        # Of the rank with the fewest; 0 where the only server is lost in the sync: its successor loads them.
        is_lost = kills.get(record["step"] - 1) == "vllm-server-0"
        assert record["weight_sync/tensors_loaded"] in ((0, num_tensors) if is_lost else (num_tensors,)), output
        assert record.get("rollout_probs_diff/max", 0.0) < 1e-3, output
