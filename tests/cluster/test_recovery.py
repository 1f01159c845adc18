"""Every process of a run is killed, or made to hang, in the middle of a step; the run finishes whole.

The driver, the store, the rollout workers, the sandbox pool and Ray are the real ones; servers and learners are
stand-ins, so that a test takes seconds. tests/e2e/test_recovery.py does the same with vLLM and FSDP.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rayapp.cluster import Cluster, StandIns, open_cluster
from rayapp.config import Config
from rayapp.driver import train_through_losses
from rayapp.errors import RestartsUsedUpError
from rayapp.run_folder import RunFolder
from rayapp.tracking.trackers import make_trackers

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 6
GROUPS_PER_STEP = 4
Fault = Callable[[], Awaitable[None]]


@pytest.fixture
def make_config(tiny_model: Path, letter_tasks: list[str], tmp_path: Path) -> Callable[..., Config]:
    def make(**sections: dict[str, Any]) -> Config:
        config: dict[str, Any] = {
            "run": {"output_dir": str(tmp_path), "name": "recovery"},
            "model": {"path": str(tiny_model)},
            "tasks": letter_tasks,
            "cluster": {"device": "cpu"},
            "rollout": {"group_size": 2, "max_prompt_tokens": 32, "max_completion_tokens": 8, "num_workers": 2},
            "train": {"num_steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP},
            "learner": {"max_tokens_per_microbatch": 256, "num_learners": 2},
            "server": {"num_servers": 2},
            "checkpoint": {"every_steps": 2},
            "recovery": {"ping_every_s": 0.5, "ping_timeout_s": 60.0},
            "tracking": {"trackers": ["jsonl"]},
        }
        return Config.model_validate(config | {name: config.get(name, {}) | s for name, s in sections.items()})

    return make


def pid_of(name: str) -> int:
    """Process behind a living actor."""
    from ray._private.state import actors  # the public state API needs a dashboard

    return next(int(a["Pid"]) for a in actors().values() if a["Name"] == name and a["State"] == "ALIVE")


async def run(
    config: Config, faults: dict[int, list[tuple[str, signal.Signals]]]
) -> tuple[Cluster, list[str], list[int]]:
    """Train. In the middle of the step that follows step N, the processes of `faults[N]` get their signal.

    Returns:
        The cluster, what it reported, and how many groups each step trained on.
    """
    notes: list[str] = []
    with RunFolder.open(config) as folder, make_trackers(config, folder) as tracker:
        async with open_cluster(
            config, report=notes.append, stand_ins=StandIns(completion_s=0.4, step_s=0.1)
        ) as cluster:
            striking = asyncio.create_task(strike(folder.path / "metrics.jsonl", faults))
            try:
                await train_through_losses(config, cluster, folder, tracker)
            finally:
                striking.cancel()
    return cluster, notes, [len(group_ids(folder.path, step)) for step in range(1, NUM_STEPS + 1)]


async def strike(metrics: Path, faults: dict[int, list[tuple[str, signal.Signals]]]) -> None:
    for step, victims in faults.items():
        while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.15)  # completions take 0.4 s: the next step's are under way
        for name, number in victims:
            os.kill(pid_of(name), number)


def records(config: Config) -> list[dict[str, float]]:
    return [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]


def group_ids(folder: Path, step: int) -> list[int]:
    import pyarrow.parquet as pq

    column = pq.read_table(folder / f"trajectories/step={step:06d}.parquet", columns=["group_id"])["group_id"]
    return sorted(set(column.to_pylist()))


def assert_whole(config: Config) -> None:
    """Every step once, every group once and in order, and the ledger balanced at each."""
    found = records(config)
    assert [record["step"] for record in found] == list(range(1, NUM_STEPS + 1))
    trained = [group_id for step in range(1, NUM_STEPS + 1) for group_id in group_ids(config.run_folder, step)]
    assert trained == list(range(NUM_STEPS * GROUPS_PER_STEP))
    for record in found:
        states = ("admitted", "ready", "training", "trained", "dropped")
        assert sum(record[f"ledger/{state}"] for state in states) == record["ledger/issued"]
        assert record["staleness/max"] <= config.train.max_staleness
        assert record["rollout/invalid"] == 0.0


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_servers_workers_and_the_pool_die_and_the_run_finishes_whole(
    make_config: Callable[..., Config], max_staleness: int
) -> None:
    config = make_config(train={"num_steps": NUM_STEPS, "groups_per_step": 4, "max_staleness": max_staleness})

    cluster, notes, _ = await run(
        config,
        {
            1: [("vllm-server-0", signal.SIGKILL)],
            2: [("rollout-worker-1", signal.SIGKILL)],
            3: [("sandbox-pool", signal.SIGKILL)],
            4: [("vllm-server-1", signal.SIGKILL), ("rollout-worker-0", signal.SIGKILL)],
        },
    )

    assert_whole(config)
    expected = {"vllm-server-0": 1, "vllm-server-1": 1, "rollout-worker-0": 1, "rollout-worker-1": 1, "sandbox-pool": 1}
    assert dict(cluster.supervisor.restarts) == expected, notes
    assert records(config)[-1]["ledger/reissued"] > 0


async def test_a_server_that_hangs_is_found_by_its_deadline_and_replaced(make_config: Callable[..., Config]) -> None:
    # Long enough for a healthy process on a busy machine: one that is starved must not be taken for hung.
    config = make_config(recovery={"ping_every_s": 0.5, "ping_timeout_s": 15.0})

    cluster, notes, _ = await run(config, {1: [("vllm-server-0", signal.SIGSTOP)]})

    assert_whole(config)
    assert dict(cluster.supervisor.restarts) == {"vllm-server-0": 1}, notes
    assert any("lost vllm-server-0: vllm-server-0.ping did not answer within 15 s" in note for note in notes)


async def test_a_learner_dies_and_all_go_on_from_the_last_checkpoint(make_config: Callable[..., Config]) -> None:
    config = make_config()

    # The stand-in refuses a step that does not follow its state's: it must be that of the checkpoint.
    cluster, _, _ = await run(config, {3: [("learner-1", signal.SIGKILL)]})

    assert_whole(config)
    assert cluster.num_learner_restarts == 1
    assert records(config)[-1]["recovery/learner_restarts"] == 1.0
    # Lost after step 3, the checkpoint is that of step 2: the ledger of what followed begins there.
    assert records(config)[-1]["ledger/trained"] == (NUM_STEPS - 2) * GROUPS_PER_STEP


async def test_a_process_that_dies_too_often_ends_the_run_with_a_checkpoint(make_config: Callable[..., Config]) -> None:
    config = make_config(recovery={"max_restarts": 0, "ping_every_s": 0.5, "ping_timeout_s": 60.0})

    with pytest.raises(RestartsUsedUpError, match=r"vllm-server-0 was lost 1 times, and recovery.max_restarts is 0"):
        await run(config, {3: [("vllm-server-0", signal.SIGKILL)]})

    with RunFolder.open(config) as folder:
        checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None
    assert checkpoint.version >= 2
