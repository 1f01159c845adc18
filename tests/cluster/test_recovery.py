"""Every process of a run is killed, or made to hang, in the middle of a step; the run finishes whole.

The driver, the store, the servers around their engine, the rollout workers, the sandbox pool and Ray are the real ones;
engines and learners are stand-ins, so that a test takes seconds. tests/e2e/test_recovery.py does the same with vLLM
and FSDP.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster as FakeCluster

from actors.handles import LearnerHandle
from actors.spawn import spawn
from actors.starting import dump_stacks
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, LearnerError, RestartsUsedUpError
from rayapp.driver.cluster import Cluster, open_cluster
from rayapp.driver.loop import train_through_losses
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.trackers import make_trackers
from support.stand_ins import stand_ins
from support.whole_runs import groups_of, records

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 6
GROUPS_PER_STEP = 4
NODE_MEMORY = 100_000_000
"""Bytes of each node's object store."""
Faults = dict[int, list[tuple[str, signal.Signals]]]


@pytest.fixture(scope="module")
def nodes(stand_in_engines: None, until_started: Callable[[Callable[[], Any]], Any]) -> Iterator[FakeCluster]:
    """A head that runs nothing, and one node for everything, with two logical GPUs: the next test finds it."""
    # As a Ray of our own has it: at nice 15 everything here would wait for whatever else the machine does.
    os.environ.setdefault("RAY_worker_niceness", "0")
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 10}
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": NODE_MEMORY, "_system_config": health}
    cluster = until_started(lambda: FakeCluster(initialize_head=True, head_node_args=head))
    until_started(lambda: cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=NODE_MEMORY))
    yield cluster
    cluster.shutdown()


@pytest.fixture
def make_config(tiny_model: Path, letter_tasks: list[str], tmp_path: Path, nodes: FakeCluster) -> Callable[..., Config]:
    def make(**sections: dict[str, Any]) -> Config:
        config: dict[str, Any] = {
            # A name of its own: the actors of the test before may be on their way out of this Ray.
            "run": {"output_dir": str(tmp_path), "name": tmp_path.name[:60]},
            "model": {"path": str(tiny_model)},
            "tasks": letter_tasks,
            "cluster": {"device": "cpu", "address": nodes.address},
            "rollout": {"group_size": 2, "max_prompt_tokens": 32, "max_completion_tokens": 8},
            "train": {"num_steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP},
            "learner": {"max_tokens_per_microbatch": 256, "num_learners": 2},
            "server": {"num_servers": 2},
            "checkpoint": {"every_steps": 2},
            "recovery": {"ping_timeout_s": 60.0},
            "tracking": {"trackers": ["jsonl"]},
        }
        return Config.model_validate(config | {name: config.get(name, {}) | s for name, s in sections.items()})

    return make


def living(name: str) -> dict[str, Any]:
    """What Ray knows of a living actor of this run."""
    from ray._private.state import actors  # the public state API needs a dashboard

    job = ray.get_runtime_context().get_job_id()
    found = (a for a in actors().values() if a["JobID"] == job and a["State"] == "ALIVE")
    return next(actor for actor in found if actor["Name"] == name)


async def tell(name: str, method: str) -> None:
    """Call one of the stand-ins' own faults."""
    await getattr(ray.get_actor(name), method).remote()


def sending(metrics: Callable[[], Path], faults: Faults) -> Callable[[], Awaitable[None]]:
    """In the middle of the step that follows step N, the processes of `faults[N]` get their signal."""

    async def strike() -> None:
        for step, victims in faults.items():
            await middle_of_the_step_after(step, metrics())
            for name, number in victims:
                os.kill(int(living(name)["Pid"]), number)

    return strike


async def middle_of_the_step_after(step: int, metrics: Path) -> None:
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.15)  # completions take 0.4 s: the next step's are under way


async def run(config: Config, faults: Faults) -> tuple[Cluster, list[str]]:
    """Train while processes get signals. Returns the cluster, and what it reported."""
    return await run_while(config, sending(lambda: config.run_folder / "metrics.jsonl", faults))


async def run_while(
    config: Config, strike: Callable[[], Awaitable[None]], *, completion_s: float = 0.4, step_s: float = 0.1
) -> tuple[Cluster, list[str]]:
    """Train and export while `strike` does its worst."""
    notes: list[str] = []

    def hear(note: str) -> None:
        notes.append(note)
        print(note)

    with RunFolder.open(config) as folder, make_trackers(config, folder) as tracker:
        async with open_cluster(
            config, report=hear, stand_ins=stand_ins(completion_s=completion_s, step_s=step_s)
        ) as cluster:
            striking = asyncio.ensure_future(strike())
            try:
                await train_through_losses(config, cluster, folder, tracker)
                await cluster.export_hf(folder.path / "final")
                assert striking.done(), "the run ended before it was struck"
                striking.result()
            finally:
                striking.cancel()
    return cluster, notes


def assert_whole(config: Config) -> None:
    """Every step once, no group twice (synchronous: all, in order), and the ledger balanced at each."""
    found = records(config.run_folder)
    assert [record["step"] for record in found] == list(range(1, NUM_STEPS + 1))
    trained = [group.group_id for group in groups_of(config.run_folder)]
    assert len(set(trained)) == len(trained) == NUM_STEPS * GROUPS_PER_STEP
    if config.train.max_staleness == 0:  # else the last step may take a later group before one that began anew
        assert trained == list(range(NUM_STEPS * GROUPS_PER_STEP))
    for record in found:
        states = ("admitted", "ready", "training", "trained", "dropped")
        assert sum(record[f"ledger/{state}"] for state in states) == record["ledger/issued"]
        assert record["staleness/max"] <= config.train.max_staleness
        assert record["rollout/invalid"] == 0.0


TURNS = ((1, 0.0, ["vllm-server-0"]), (2, 0.8, ["vllm-server-1"]), (4, 0.8, ["learner-1", "vllm-server-0"]))
"""After which step, seconds into its rollout, and who is killed: a server while it samples, and one while the learners
train; a learner together with its GPU's server."""
PING_TIMEOUT_S = 15.0
"""Long enough for a healthy process on a busy machine: one that is starved must not be taken for hung."""


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.long), 1])
async def test_servers_workers_and_the_pool_die_and_a_server_hangs_and_the_run_finishes_whole(
    make_config: Callable[..., Config], max_staleness: int
) -> None:
    # Once with a server that hangs: only its deadline finds it.
    hangs = max_staleness == 0
    recovery = {"ping_timeout_s": PING_TIMEOUT_S if hangs else 60.0}
    config = make_config(train={"max_staleness": max_staleness}, rollout={"num_workers": 2}, recovery=recovery)

    cluster, notes = await run(
        config,
        {
            1: [("vllm-server-0", signal.SIGKILL)],
            2: [("rollout-worker-1", signal.SIGKILL)],
            3: [("sandbox-pool", signal.SIGKILL)],
            4: [("vllm-server-1", signal.SIGKILL), ("rollout-worker-0", signal.SIGKILL)],
        }
        | ({5: [("vllm-server-0", signal.SIGSTOP)]} if hangs else {}),
    )

    assert_whole(config)
    expected = {"vllm-server-0": 1, "vllm-server-1": 1, "rollout-worker-0": 1, "rollout-worker-1": 1, "sandbox-pool": 1}
    assert dict(cluster.supervisor.restarts) == expected | ({"vllm-server-0": 2} if hangs else {}), notes
    assert records(config.run_folder)[-1]["ledger/reissued"] > 0
    told = f"lost vllm-server-0: vllm-server-0.ping did not answer within {PING_TIMEOUT_S:g} s"
    assert any(told in note for note in notes) == hangs, notes


@pytest.mark.long
async def test_a_server_that_dies_in_a_weight_sync_and_one_that_answers_but_samples_nothing_are_replaced(
    make_config: Callable[..., Config],
) -> None:
    config = make_config(recovery={"stall_replace_s": 10.0, "ping_timeout_s": 60.0})
    metrics = config.run_folder / "metrics.jsonl"

    async def strike() -> None:
        await middle_of_the_step_after(1, metrics)
        await tell("vllm-server-0", "die_in_update")
        await middle_of_the_step_after(3, metrics)
        await tell("vllm-server-1", "stall")

    cluster, notes = await run_while(config, strike)

    assert_whole(config)
    assert dict(cluster.supervisor.restarts) == {"vllm-server-0": 1, "vllm-server-1": 1}, notes
    assert sum(record["weight_sync/servers_failed"] for record in records(config.run_folder)) == 1.0
    stalled = next(note for note in notes if note.startswith("lost vllm-server-1"))
    assert "requests in progress advanced for" in stalled
    assert "recovery.stall_replace_s = 10" in stalled


@pytest.mark.parametrize(
    "ahead", [{}, {"max_staleness": 2, "partial_rollouts": True, "extra_groups": 1}], ids=["in order", "ahead"]
)
async def test_servers_and_learners_take_turns_on_shared_gpus_also_after_losses(
    make_config: Callable[..., Config], ahead: dict[str, Any]
) -> None:
    """A stand-in fails if it needs a GPU that another has: an engine to start and wake, a learner to load its model, to
    train and to export it. An engine that sleeps takes no prompt."""
    config = make_config(
        cluster={"device": "gpu", "placement": "colocated"},
        server={"weight_transport": "object_store"},
        train=ahead,
        checkpoint={"every_steps": 1},
        eval={"every_steps": 3},
    )
    metrics = config.run_folder / "metrics.jsonl"

    async def strike() -> None:
        for step, more_s, victims in TURNS:
            await middle_of_the_step_after(step, metrics)
            await asyncio.sleep(more_s)
            for name in victims:
                os.kill(int(living(name)["Pid"]), signal.SIGKILL)

    cluster, notes = await run_while(config, strike, step_s=1.0)

    assert_whole(config)
    assert dict(cluster.supervisor.restarts) == {"vllm-server-0": 2, "vllm-server-1": 1}, notes
    assert cluster.num_learner_restarts == 1, notes


async def test_a_process_that_dies_too_often_ends_the_run_with_a_checkpoint_and_before_it_all_stacks_can_be_had(
    make_config: Callable[..., Config],
) -> None:
    config = make_config(recovery={"max_restarts": 0, "ping_timeout_s": 60.0})
    metrics, stacks = config.run_folder / "metrics.jsonl", []

    async def look_and_kill() -> None:
        await middle_of_the_step_after(1, metrics)
        stacks.append(await dump_stacks())
        await middle_of_the_step_after(3, metrics)
        os.kill(int(living("vllm-server-0")["Pid"]), signal.SIGKILL)

    # A step takes longer than to see it, look for the process and kill it on a busy machine.
    with pytest.raises(RestartsUsedUpError, match=r"vllm-server-0 was lost 1 times, and recovery.max_restarts is 0"):
        await run_while(config, look_and_kill, completion_s=2.5)

    with RunFolder.open(config) as folder:
        checkpoint = folder.checkpoints.latest()
    assert checkpoint is not None
    assert checkpoint.version == 3  # saved on the way out: the one before is of step 2
    (text,) = stacks
    for name in ("vllm-server-0", "vllm-server-1", "rollout-worker-0", "learner-1", "sandbox-pool"):
        assert f"=== {name} (pid " in text
    # Either the stacks, or why this kernel gives none (py-spy needs ptrace).
    assert "Thread" in text or "no stack" in text


async def test_a_learner_dies_and_then_a_whole_node_is_lost_and_all_go_on_from_the_last_checkpoint_on_the_other(
    make_config: Callable[..., Config], nodes: FakeCluster
) -> None:
    config = make_config()
    metrics = config.run_folder / "metrics.jsonl"
    nodes.add_node(num_cpus=2, object_store_memory=NODE_MEMORY)
    nodes.wait_for_nodes()

    async def kill_a_learner_and_lose_its_node() -> None:
        await middle_of_the_step_after(3, metrics)
        os.kill(int(living("learner-1")["Pid"]), signal.SIGKILL)
        await middle_of_the_step_after(5, metrics)
        lost = living("learner-0")["Address"]["NodeID"]
        node = next(n for n in nodes.list_all_nodes() if n.node_id == lost)
        await asyncio.to_thread(nodes.remove_node, node, allow_graceful=False)

    # The stand-in refuses a step that does not follow its state's: it must be that of the checkpoint. And the last step
    # takes longer than it takes to lose a node.
    cluster, notes = await run_while(config, kill_a_learner_and_lose_its_node, completion_s=2.5)

    # Servers and learners are packed on one node: all of them went with it, and with the groups in its memory.
    assert_whole(config)
    after_the_learner, found = NUM_STEPS - 2, {record["step"]: record for record in records(config.run_folder)}
    assert found[after_the_learner]["recovery/learner_restarts"] == 1.0, notes
    assert cluster.num_learner_restarts >= 2, notes
    assert {"vllm-server-0", "vllm-server-1"} <= set(cluster.supervisor.restarts), notes
    # Lost after step 3, and after step 5, the checkpoints are those of steps 2 and 4: the ledger of what followed
    # begins there.
    assert found[after_the_learner]["ledger/trained"] == (after_the_learner - 2) * GROUPS_PER_STEP
    assert found[NUM_STEPS]["ledger/trained"] == (NUM_STEPS - 4) * GROUPS_PER_STEP


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


async def test_what_the_cluster_cannot_hold_is_refused_and_the_run_folder_stays_as_it_was(
    make_config: Callable[..., Config],
) -> None:
    # 40 servers and 2 learners ask for 0.1 CPU each, 4.2 together; the node has 2.
    config = make_config(server={"num_servers": 40, "start_timeout_s": 25.0})
    with RunFolder.open(config) as folder:
        before = contents(folder.path)

    with pytest.raises(ConfigError, match=r"could not be placed .*: 42 x \(CPU 0\.1\).* Lower server\.num_servers"):
        await run(config, {})

    with RunFolder.open(config) as folder:
        assert folder.checkpoints.latest() is None
        assert before.items() <= contents(folder.path).items()


async def test_a_learner_whose_port_is_taken_says_so_and_what_to_do(
    make_config: Callable[..., Config], nodes: FakeCluster
) -> None:
    with socket.create_server(("", 0)) as taken, ray.init(address=nodes.address, namespace="port", log_to_driver=False):
        port = taken.getsockname()[1]
        actor = spawn("learner", "learner-0", make_config(), 0, 2, "127.0.0.1", port)
        with pytest.raises(LearnerError, match=rf"not find .* at 127\.0\.0\.1:{port}: .*start the run again"):
            await LearnerHandle(actor, "learner-0", 60.0).ready(300.0)
