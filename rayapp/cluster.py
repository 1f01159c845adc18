"""Every actor of a run, started together and ended together. The only module that imports `actors`.

`open_cluster` is a context manager: whatever happens inside, on the way out no actor, no engine process and no sandbox
is left. The driver talks to a `Cluster`; it never sees a Ray handle.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from actors.calls import answer
from actors.gpus import wait_for_gpus
from actors.handles import (
    LearnerHandle,
    RolloutWorkerHandle,
    SandboxPoolHandle,
    SandboxReaperHandle,
    VllmServerHandle,
)
from actors.learner_group import LearnerGroup
from actors.members import PoolMember, ServerMember, WorkerMember
from actors.metrics import MetricsTracker
from actors.placement import Placement
from actors.spawn import Seat, free_address, kill, kill_named, name_is_free, spawn
from actors.stacks import dump_stacks
from rayapp.config import FEWER_GPUS, Config
from rayapp.errors import (
    ConfigError,
    LearnersLostError,
    ObjectsLostError,
    ProcessDiedError,
    RayappError,
    RestartsUsedUpError,
    first_error,
)
from rayapp.interrupts import to_the_end
from rayapp.kept_groups import summaries
from rayapp.protocols import Tracker
from rayapp.ray_session import RaySession, ray_session
from rayapp.sandbox.config import DaytonaConfig, E2BConfig
from rayapp.store import StoredGroup
from rayapp.supervision import Limits, Member, Supervisor
from rayapp.types import Group
from rayapp.weights.direct import DirectTransport
from rayapp.weights.object_store import ObjectStoreTransport
from rayapp.weights.plan import TransferPlan, choose_transport, transfer_plan

log = logging.getLogger(__name__)
Report = Callable[[str], None]
CLOSE_TIMEOUT_S = 30.0
REAPER_NAME_ATTEMPTS = 100


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Handles of a run's actors, all of them ready. Only the learners' change when a process is replaced."""

    config: Config
    pool: SandboxPoolHandle
    servers: tuple[VllmServerHandle, ...]
    learners: LearnerGroup
    rollout_workers: tuple[RolloutWorkerHandle, ...]
    weights: ObjectStoreTransport | DirectTransport
    supervisor: Supervisor
    dashboard_url: str
    start_learners: Callable[[], Awaitable[LearnerGroup]]
    """Ends those there are and starts new ones, with the model's own weights."""
    num_learner_restarts: int = 0

    @property
    def is_synchronous(self) -> bool:
        return self.config.train.max_staleness == 0

    def rollout_worker(self, group_id: int) -> RolloutWorkerHandle:
        return self.rollout_workers[group_id % len(self.rollout_workers)]

    def server_is_up(self, index: int) -> bool:
        """False while it is being replaced."""
        return self.supervisor.is_up(self.servers[index].name)

    def check_weights(self) -> None:
        """Return if a server that is replaced now gets weights.

        Raises:
            LearnersLostError: those of the last sync are gone with their node, and the learners with them.
        """
        if self.weights.are_lost:
            raise LearnersLostError("the weights of the last sync were on a node that is gone.")

    async def sync_weights(self, version: int) -> dict[str, float]:
        """Give every server the learners' weights under this version. Returns `weight_sync/*` metrics.

        A server that failed to take them has been replaced, and has taken them, when this returns.
        """
        metrics, failed = await self.weights.sync(version, source=self.learners, servers=self.servers)
        for name, error in failed.items():
            # One that is gone is found by its ping; one that answers may hold half of the new weights.
            if not isinstance(error, ProcessDiedError):
                await self.supervisor.condemn(name, str(error))
        if failed:
            await self.supervisor.settled()
        return metrics | {"weight_sync/servers_failed": float(len(failed))}

    async def lend_gpus(self) -> None:
        """Before a step is trained: servers that share the learners' GPUs sleep. The next sync wakes them."""
        if self.config.cluster.placement == "split":
            return
        asleep = await asyncio.gather(*(server.sleep() for server in self.servers), return_exceptions=True)
        for server, outcome in zip(self.servers, asleep, strict=True):
            if isinstance(outcome, RayappError):
                await self.supervisor.condemn(server.name, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome

    async def replace_learners(self, error: LearnersLostError) -> None:
        """Start all learners again; what they had learned since the last checkpoint is gone.

        Raises:
            RestartsUsedUpError: that happened too often.
        """
        limit = self.config.recovery.max_restarts
        if self.num_learner_restarts >= limit:
            raise RestartsUsedUpError(
                f"the learners were lost {limit + 1} times, and recovery.max_restarts is {limit}. Last reason: {error} "
                "Start the run again: it goes on from its last checkpoint."
            )
        self.num_learner_restarts += 1
        self.learners = await self.start_learners()

    async def dump_stacks(self) -> str:
        """Where every actor is now."""
        return await dump_stacks()

    def recovery_metrics(self) -> dict[str, float]:
        """`recovery/*`"""
        return self.supervisor.metrics() | {"recovery/learner_restarts": float(self.num_learner_restarts)}

    def metrics_tracker(self) -> Tracker:
        """Reports each step to Ray's metrics endpoint; see docs/operate.md."""
        return MetricsTracker(self.config.run.name, self.config.train.num_steps)

    def put_groups(self, groups: Sequence[Group]) -> list[StoredGroup[Any]]:
        """Groups that a checkpoint kept, back in the object store."""
        import ray

        return [
            StoredGroup(summary=summary, ref=ray.put(group))
            for group, summary in zip(groups, summaries(groups), strict=True)
        ]

    async def fetch_groups(self, groups: Sequence[StoredGroup[Any]]) -> list[Group]:
        """The groups themselves, for the trajectory file.

        Raises:
            LearnersLostError: some were on a node that is gone. Their step has to be done again.
        """
        timeout_s = self.config.server.sync_timeout_s
        try:
            return list(
                await asyncio.gather(*(answer(g.ref, timeout_s=timeout_s, what="the step's groups") for g in groups))
            )
        except ObjectsLostError as error:
            raise LearnersLostError(str(error)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """Servers without an engine and learners without a model: see `actors.stand_ins`."""

    completion_s: float = 0.0
    step_s: float = 0.0


@asynccontextmanager
async def open_cluster(
    config: Config,
    *,
    with_learners: bool = True,
    report: Report = lambda text: None,
    stand_ins: StandIns | None = None,
) -> AsyncIterator[Cluster]:
    """Start a run's actors.

    Args:
        with_learners: False for evaluation, which only generates and scores.
        report: told, in a line each, where Ray's dashboard is, what is starting, and what is ready.
        stand_ins: in place of the real servers and learners, for tests and benchmarks of everything else.
    Raises:
        ConfigError: Ray can't be reached, or has fewer GPUs than the config needs.
    """
    report("connecting to Ray")
    with ray_session(config) as session:
        report(await asyncio.to_thread(session.dashboard_line))
        started = _Started(stand_ins)
        try:
            cluster = await _start(config, started, session, with_learners=with_learners, report=report)
            async with cluster.supervisor.watching():
                yield cluster
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            # A second Ctrl-C must not leave a paid sandbox or an engine process behind.
            await to_the_end(started.close())


class _Started:
    """What was started so far, in order; ended in reverse."""

    def __init__(self, stand_ins: StandIns | None = None) -> None:
        self._stand_ins = stand_ins
        self._handles: list[Any] = []
        self.placement: Placement | None = None

    def server(self, name: str, *args: object, seat: Seat) -> Any:
        """Spawn a server, or what stands for one."""
        if self._stand_ins is None:
            return spawn("vllm-server", name, *args, seat=seat)
        return spawn("scripted-server", name, *args, self._stand_ins.completion_s, seat=seat)

    def learner(self, name: str, *args: object, seat: Seat) -> Any:
        """Spawn a learner, or what stands for one."""
        if self._stand_ins is None:
            return spawn("learner", name, *args, seat=seat)
        return spawn("instant-learner", name, *args, self._stand_ins.step_s, seat=seat)

    def add(self, handle: Any) -> Any:
        self._handles.append(handle)
        return handle

    async def end(self, handles: Sequence[Any]) -> None:
        """End some of them at once, with no leave."""
        for handle in handles:
            self._handles.remove(handle)
            kill(handle.actor)

    @property
    def names(self) -> list[str]:
        return [handle.name for handle in self._handles]

    async def close(self) -> None:
        """Ask every actor to end cleanly, then end those that did not answer. Never raises: it runs in `finally`."""
        for handle in reversed(self._handles):
            if hasattr(handle, "close"):
                try:
                    await handle.close(CLOSE_TIMEOUT_S)
                except (RayappError, asyncio.CancelledError) as error:
                    log.warning("%s did not end cleanly: %s", handle.name, error)
            kill(handle.actor)
        self._handles.clear()
        if self.placement is not None:
            self.placement.release()


async def _start(
    config: Config, started: _Started, session: RaySession, *, with_learners: bool, report: Report
) -> Cluster:
    await wait_for_gpus(config)
    on_gpu = _uses_gpus(config)
    timeout_s = config.cluster.start_timeout_s + config.server.start_timeout_s
    pool = started.add(spawn_pool(config))  # first: its name tells whether another run of this name goes on
    placement = await Placement.reserve(
        config, on_gpu=on_gpu, timeout_s=config.cluster.start_timeout_s, with_learners=with_learners
    )
    started.placement = placement
    plan = _plan(config, on_gpu=on_gpu) if with_learners else None
    learners = LearnerGroup(await _spawn_learners(config, started, placement) if with_learners else (), plan)
    servers = _spawn_servers(config, started, placement, must_sync=with_learners)
    workers = _spawn_rollout_workers(config, started, servers, pool)
    handles: tuple[VllmServerHandle | LearnerHandle | RolloutWorkerHandle, ...]
    handles = (*servers, *learners.handles, *workers)
    report(f"starting: {', '.join(started.names)}")
    async with asyncio.TaskGroup() as starting:
        starting.create_task(_report_ready(pool.name, ready_pool(config, pool, session, timeout_s), report))
        for handle in handles:
            starting.create_task(_report_ready(handle.name, handle.ready(timeout_s), report))
    transport = DirectTransport if plan is not None else ObjectStoreTransport
    weights = transport(config.server.sync_timeout_s)
    members: list[Member] = [
        PoolMember(pool, lambda: ready_pool(config, pool, session, timeout_s)),
        *(ServerMember(server, timeout_s, weights.catch_up) for server in servers),
        *(WorkerMember(worker, timeout_s, pool) for worker in workers),
    ]

    async def start_learners() -> LearnerGroup:
        await started.end(cluster.learners.handles)
        group = LearnerGroup(await _spawn_learners(config, started, placement), plan)
        await asyncio.gather(
            *(_report_ready(learner.name, learner.ready(timeout_s), report) for learner in group.handles)
        )
        return group

    cluster = Cluster(
        config=config,
        pool=pool,
        servers=servers,
        learners=learners,
        rollout_workers=workers,
        weights=weights,
        supervisor=Supervisor(members, _limits(config, timeout_s), report=report),
        dashboard_url=session.dashboard_url,
        start_learners=start_learners,
    )
    return cluster


def _plan(config: Config, *, on_gpu: bool) -> TransferPlan | None:
    """Of a group over learners and engines; None where weights go through the object store."""
    chosen = choose_transport(config, on_gpu=on_gpu)
    return None if chosen == "object_store" else transfer_plan(config, chosen)


def _limits(config: Config, start_timeout_s: float) -> Limits:
    recovery = config.recovery
    return Limits(
        max_restarts=recovery.max_restarts,
        ping_every_s=recovery.ping_every_s,
        ping_timeout_s=recovery.ping_timeout_s,
        revive_timeout_s=start_timeout_s + config.server.sync_timeout_s,
    )


async def _report_ready(name: str, ready: Awaitable[object], report: Report) -> None:
    started = time.monotonic()
    await ready
    report(f"ready: {name} ({time.monotonic() - started:.0f} s)")


def spawn_pool(config: Config) -> SandboxPoolHandle:
    """Start the sandbox-pool actor; `ready_pool` comes next."""
    return SandboxPoolHandle(spawn("sandbox-pool", "sandbox-pool", config.sandbox, config.run.name), "sandbox-pool")


async def ready_pool(config: Config, pool: SandboxPoolHandle, session: RaySession, timeout_s: float) -> None:
    """Wait for the pool, with a reaper behind it where one can outlive the driver and has something to end."""
    # Local sandboxes and those of an MCP session end with the process that holds them; a Ray of our own ends with us.
    has_lasting = any(isinstance(section, E2BConfig | DaytonaConfig) for section in config.sandbox.providers)
    if has_lasting and not session.is_own:
        await pool.guard(await _spawn_reaper(config), timeout_s)
    await pool.ready(timeout_s)


async def _spawn_reaper(config: Config) -> SandboxReaperHandle:
    """The run's reaper. Not among what ends with the driver: the pool dismisses it, or it ends itself."""
    name = f"sandbox-reaper-{config.run.name}"
    # An earlier run's, still waiting for its grace to pass: it would take this run's sandboxes for that one's.
    for _ in range(REAPER_NAME_ATTEMPTS):
        if not kill_named(name):
            break
        await asyncio.sleep(0.1)
    return SandboxReaperHandle(spawn("sandbox-reaper", name, config.sandbox, config.run.name), name)


def _spawn_servers(
    config: Config, started: _Started, placement: Placement, *, must_sync: bool
) -> tuple[VllmServerHandle, ...]:
    names = [f"vllm-server-{index}" for index in range(config.server.num_servers)]
    return tuple(
        started.add(
            VllmServerHandle(
                started.server(name, config, index, must_sync, seat=placement.server(index)),
                name,
                config.server.request_timeout_s,
                config.server.sync_timeout_s,
            )
        )
        for index, name in enumerate(names)
    )


async def _spawn_learners(config: Config, started: _Started, placement: Placement) -> tuple[LearnerHandle, ...]:
    world_size = config.learner.num_learners
    # Rank 0 listens there, and may be on another node than the driver.
    address, port = await placement.address_of_learner(0)
    handles = []
    for rank in range(world_size):
        name = f"learner-{rank}"
        await name_is_free(name)
        actor = started.learner(name, config, rank, world_size, address, port, seat=placement.learner(rank))
        handles.append(started.add(LearnerHandle(actor, name, config.learner.step_timeout_s)))
    return tuple(handles)


def _spawn_rollout_workers(
    config: Config, started: _Started, servers: tuple[VllmServerHandle, ...], pool: SandboxPoolHandle
) -> tuple[RolloutWorkerHandle, ...]:
    names = [f"rollout-worker-{index}" for index in range(config.rollout.num_workers)]
    return tuple(
        started.add(
            RolloutWorkerHandle(
                spawn("rollout-worker", name, config, index, servers, pool), name, config.rollout.group_deadline_s
            )
        )
        for index, name in enumerate(names)
    )


def _uses_gpus(config: Config) -> bool:
    """Whether servers and learners ask Ray for GPUs.

    Raises:
        ConfigError: the cluster has fewer than the config needs.
    """
    import ray

    have = int(ray.cluster_resources().get("GPU", 0))
    if config.cluster.device == "cpu" or (config.cluster.device == "auto" and have == 0):
        return False
    need = config.num_gpus_needed
    if need > have:
        raise ConfigError(f"{config.gpu_arithmetic}, but the Ray cluster has {have}. {FEWER_GPUS}, or add GPUs.")
    return True


@asynccontextmanager
async def open_learners(config: Config, *, report: Report = lambda text: None) -> AsyncIterator[LearnerGroup]:
    """Only the learners of a run, as a replay needs them; ended behind the block.

    Raises:
        ConfigError: Ray can't be reached, or has fewer GPUs than learners.
    """
    timeout_s = config.cluster.start_timeout_s
    with ray_session(config):
        started = _Started()
        try:
            on_gpu = _learners_use_gpus(config)
            address, port = free_address()
            world_size = config.learner.num_learners
            handles = []
            for rank in range(world_size):
                name = f"learner-{rank}"
                actor = spawn("learner", name, config, rank, world_size, address, port, seat=Seat(num_gpus=int(on_gpu)))
                handles.append(started.add(LearnerHandle(actor, name, config.learner.step_timeout_s)))
            await asyncio.gather(*(_report_ready(h.name, h.ready(timeout_s), report) for h in handles))
            yield LearnerGroup(tuple(handles))
        finally:
            await to_the_end(started.close())


def _learners_use_gpus(config: Config) -> bool:
    """As `_uses_gpus`, for a run without servers."""
    import ray

    have, need = int(ray.cluster_resources().get("GPU", 0)), config.learner.num_learners
    if config.cluster.device == "cpu" or (config.cluster.device == "auto" and have == 0):
        return False
    if need > have:
        raise ConfigError(f"GPUs: {need} learners, but the Ray cluster has {have}. Lower learner.num_learners.")
    return True
