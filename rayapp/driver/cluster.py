"""Starts all actors of a run together and ends them together. No other module imports `actors`.

However the block of `open_cluster` ends, no actor, engine process or sandbox is left.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.handles import RolloutWorkerHandle, SandboxPoolHandle, VllmServerHandle, answer
from actors.learner_group import LearnerGroup
from actors.metrics import MetricsTracker
from actors.own_ray import one_connection, ray_session
from actors.placement import Placement, uses_gpus, wait_for_gpus
from actors.routing import Router
from actors.starting import (
    NO_STAND_INS,
    ModelServerMember,
    PoolMember,
    Report,
    ServerMember,
    StandIns,
    Started,
    WorkerMember,
    all_ready,
    dump_stacks,
    spawn_learners,
    spawn_model_servers,
    spawn_pool,
    spawn_rollout_workers,
    spawn_servers,
)
from rayapp.config.bundles import asked_servers, bundles_of, num_gpus_of
from rayapp.config.config import Config, explain_number_formats, with_addresses, with_number_formats, with_values
from rayapp.core.aio import finish_despite_cancels
from rayapp.core.errors import (
    LearnersLostError,
    ObjectsLostError,
    ProcessDiedError,
    RayappError,
    RestartsUsedUpError,
    first_error,
)
from rayapp.core.machine import instruction_set
from rayapp.core.protocols import Tracker
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group
from rayapp.driver.store import StoredGroup
from rayapp.driver.supervision import Supervisor, Watched
from rayapp.engine.weights.sync import (
    GroupCarrier,
    StoreCarrier,
    TransferRanks,
    WeightSync,
    choose_transport,
    transfer_plan,
)
from rayapp.rollout.container_images import ImagePlacement, PromptImages

__all__ = [
    "Cluster",
    "LearnerGroup",
    "RolloutWorkerHandle",
    "Router",
    "StandIns",
    "one_connection",
    "open_cluster",
    "open_learners",
    "spawn_pool",
]


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Handles of a run's actors, which are all ready. Only those of learners change when replaced."""

    config: Config
    pool: SandboxPoolHandle
    servers: tuple[VllmServerHandle, ...]
    learners: LearnerGroup
    rollout_workers: tuple[RolloutWorkerHandle, ...]
    weights: WeightSync
    supervisor: Supervisor
    router: Router
    images: ImagePlacement
    # Function that ends these learners, makes room, and starts new ones with the start model's weights.
    start_learners: Callable[[LearnerGroup, Callable[[], Awaitable[None]]], Awaitable[LearnerGroup]]
    num_gpus: int = 0  # of all processes that hold models; 0 on a CPU
    num_learner_restarts: int = 0

    @property
    def is_synchronous(self) -> bool:
        return self.config.train.max_staleness == 0

    def check_weights(self) -> None:
        if self.weights.are_lost:
            raise LearnersLostError("the weights of the last sync were on a node that is gone.")

    async def sync_weights(self, version: int) -> dict[str, float]:
        """Send the learners' weights, as this policy version, to every server; return `weight_sync/*`. A server that
        fails to load them is replaced, and loads them before this method returns."""
        metrics, failed = await self.weights.sync(
            version, learners=self.learners, servers=self.servers, settled=self.supervisor.settled
        )
        if failed:
            await self._replace(failed)
        return metrics | {"weight_sync/servers_failed": float(len(failed))}

    async def _replace(self, failed: Mapping[str, RayappError]) -> None:
        # A server is replaced once, even if several calls report its failure.
        # Condemn only servers that are alive but hold half-loaded weights: pings find dead servers. Replace all of them
        # at once, because a server takes minutes to start on a GPU. Pass the incarnation, so that a server that was
        # already replaced is not replaced again.
        await asyncio.gather(
            *(
                self.supervisor.condemn(name, self.supervisor.incarnation(name), str(error))
                for name, error in failed.items()
                if not isinstance(error, ProcessDiedError)
            )
        )
        await self.supervisor.settled()

    async def lend_gpus(self) -> None:
        """Put the servers to sleep before a training step, if they share the learners' GPUs or keep their requests. The
        next sync wakes them."""
        if self.config.cluster.placement == "split" and not self.config.train.partial_rollouts:
            return
        while failed := await self._put_to_sleep():
            await self._replace(failed)  # then put the new servers to sleep

    async def _put_to_sleep(self) -> dict[str, RayappError]:
        """Put the servers to sleep. Return those that stayed awake, with their errors."""
        asleep = await asyncio.gather(*(server.sleep() for server in self.servers), return_exceptions=True)
        failed: dict[str, RayappError] = {}
        for server, outcome in zip(self.servers, asleep, strict=True):
            if isinstance(outcome, RayappError):
                failed[server.name] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return failed

    async def export_hf(self, folder: Path) -> None:
        """Write the learners' model. Call it last: servers on the same GPUs stay asleep."""
        if self.config.cluster.placement == "colocated":
            await self._put_to_sleep()
        await self.learners.export_hf(folder)

    async def replace_learners(self, error: LearnersLostError) -> None:
        """Start all learners again; their work since the last checkpoint is lost."""
        limit = self.config.recovery.max_restarts
        if self.num_learner_restarts >= limit:
            raise RestartsUsedUpError(
                f"the learners were lost {limit + 1} times, and recovery.max_restarts is {limit}. Last reason: {error} "
                "Start the run again: it continues from its last checkpoint."
            )
        self.num_learner_restarts += 1
        self.learners = await self.start_learners(self.learners, self._make_room)

    async def _make_room(self) -> None:
        # New learners load a model, which does not fit on a GPU beside a KV cache, nor beside a server that starts.
        if self.config.cluster.placement == "colocated":
            await self.lend_gpus()

    async def dump_stacks(self) -> str:
        return await dump_stacks()

    def recovery_metrics(self) -> dict[str, float]:
        return self.supervisor.metrics() | {"recovery/learner_restarts": float(self.num_learner_restarts)}

    def metrics_tracker(self) -> Tracker:
        return MetricsTracker(self.config.run.name, self.config.train.num_steps)

    def put_groups(self, groups: Sequence[Group]) -> list[StoredGroup[Any]]:
        """Put groups from a checkpoint back into the object store."""
        import ray

        return [StoredGroup(summary=summarize_group(group, time_total_s=0.0), ref=ray.put(group)) for group in groups]

    async def fetch_groups(self, groups: Sequence[StoredGroup[Any]]) -> list[Group]:
        timeout_s = self.config.server.sync_timeout_s
        try:
            return list(
                await asyncio.gather(*(answer(g.ref, timeout_s=timeout_s, what="the step's groups") for g in groups))
            )
        except ObjectsLostError as error:
            raise LearnersLostError(str(error)) from None


def num_held_gpus(config: Config, *, with_servers: bool = True) -> int:
    bundles = bundles_of(config, with_servers=with_servers, with_learners=True)
    return num_gpus_of(bundles) if uses_gpus(config, bundles) else 0


def num_alive_nodes() -> int:
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes())


@asynccontextmanager
async def open_cluster(
    config: Config,
    *,
    with_learners: bool = True,
    report: Report = lambda text: None,
    on_lease: Callable[[], None] = lambda: None,
    stand_ins: StandIns = NO_STAND_INS,
    images: Sequence[PromptImages] = (),
) -> AsyncIterator[Cluster]:
    """Start a run's actors; without `with_learners` it only generates and scores.

    With `images` (of the training prompts, by source) a group goes to a worker that has its image. `on_lease` is called
    when the run has its GPUs, before any process loads a model. `report` gets a line for each event. `stand_ins` are
    for tests and benchmarks. ConfigError: Ray can't be reached, or has too few GPUs.
    """
    if not with_learners:  # weights are rounded only under adapters: a folder's are merged with its adapter
        config = with_values(config, model={"quantization": "none"})
    async with _session(config, report, stand_ins) as started:
        cluster = await _start(
            config, started, with_learners=with_learners, report=report, on_lease=on_lease, images=images
        )
        async with cluster.supervisor.watching():
            yield cluster


@asynccontextmanager
async def _session(config: Config, report: Report, stand_ins: StandIns = NO_STAND_INS) -> AsyncIterator[Started]:
    """Connect to Ray and yield a `Started` whose actors end with the block."""
    with ray_session(config, report):
        started = Started(stand_ins)
        try:
            yield started
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        finally:
            # A second Ctrl-C must not leave a paid sandbox or an engine process behind.
            await finish_despite_cancels(started.close())


async def _reserve(
    config: Config, started: Started, report: Report, *, with_servers: bool = True, with_learners: bool = True
) -> tuple[Config, Placement, bool]:
    """Return the config with the number formats of its device, the placement, and True if it is on GPUs."""
    bundles = bundles_of(config, with_servers=with_servers, with_learners=with_learners)
    await wait_for_gpus(config, bundles)
    on_gpu = uses_gpus(config, bundles)
    started.placement = await Placement.reserve(
        config,
        on_gpu=on_gpu,
        timeout_s=config.server.place_timeout_s,
        with_servers=with_servers,
        with_learners=with_learners,
    )
    if not on_gpu:
        report(explain_number_formats(config))
    if config.rounding_note:
        report(config.rounding_note)
    return with_number_formats(config, on_gpu=on_gpu), started.placement, on_gpu


async def _start(
    config: Config,
    started: Started,
    *,
    with_learners: bool,
    report: Report,
    on_lease: Callable[[], None],
    images: Sequence[PromptImages],
) -> Cluster:
    timeout_s = config.server.place_timeout_s + config.server.start_timeout_s
    pool = started.add(spawn_pool(config))  # first, because it fails if a run of this name is in progress
    config, placement, on_gpu = await _reserve(config, started, report, with_learners=with_learners)
    on_lease()
    plan = _plan(config, on_gpu=on_gpu) if with_learners else None
    processor = processor_of(on_gpu=on_gpu)
    models, asking = await _start_models(config, started, placement, timeout_s, report)
    servers = spawn_servers(config, started, placement, must_sync=with_learners)
    learners = LearnerGroup(
        await spawn_learners(config, started, placement) if with_learners else (), config, plan, processor
    )
    workers = spawn_rollout_workers(asking, started, servers, pool)
    report(f"starting: {', '.join(started.names)}")
    beside: dict[str, Awaitable[object]] = {pool.name: pool.ready(timeout_s)}
    beside |= {server.name: server.ready(timeout_s) for server in servers}
    beside |= {worker.name: worker.ready(timeout_s) for worker in workers}
    if placement.shares_gpus:
        # Load no policy meanwhile: an engine measures and takes the free GPU memory. A sleeping engine leaves the GPU
        # to the learner.
        await all_ready(beside, report)
        await asyncio.gather(*(server.sleep() for server in servers))
        beside = {}
    await all_ready(beside | {handle.name: handle.ready(timeout_s) for handle in learners.handles}, report)
    carrier = (GroupCarrier if plan is not None else StoreCarrier)(config.server.sync_timeout_s)
    weights = WeightSync(carrier)
    members: list[Watched] = [
        PoolMember(pool, timeout_s),
        *models,
        *(ServerMember(server, timeout_s, weights.catch_up) for server in servers),
        *(WorkerMember(worker, timeout_s, pool) for worker in workers),
    ]
    shared = {server.name for server in servers} if placement.shares_gpus else set()

    async def may_start(name: str) -> None:
        # A server takes the free memory of its GPU, and can't start while a learner uses most of that memory.
        if name in shared:
            await cluster.learners.rest()

    revive_s = timeout_s + config.server.sync_timeout_s
    supervisor = Supervisor(members, config.recovery, revive_timeout_s=revive_s, report=report, may_start=may_start)
    cluster = Cluster(
        num_gpus=num_gpus_of(bundles_of(config, on_gpu=on_gpu, with_learners=with_learners)),
        config=config,
        pool=pool,
        servers=servers,
        learners=learners,
        rollout_workers=workers,
        weights=weights,
        supervisor=supervisor,
        router=Router(len(servers), is_up=lambda index: supervisor.is_up(servers[index].name)),
        images=ImagePlacement.of(config, images),
        start_learners=partial(_start_learners_again, config, started, placement, timeout_s, report),
    )
    return cluster


async def _start_models(
    config: Config,
    started: Started,
    placement: Placement,
    timeout_s: float,
    report: Report,
) -> tuple[list[ModelServerMember], Config]:
    """Return the started servers, and the config with their addresses."""
    key = secrets.token_urlsafe(24)
    handles = spawn_model_servers(config, started, placement, asked_servers(config), key)
    members: dict[str, ModelServerMember] = {}

    async def up(name: str) -> None:
        members[name] = ModelServerMember(handles[name], timeout_s, await handles[name].ready(timeout_s))

    if handles:
        report(f"starting: {', '.join(handle.name for handle in handles.values())}")
        await all_ready({handles[name].name: up(name) for name in handles}, report)
    return list(members.values()), with_addresses(config, {name: member.url for name, member in members.items()}, key)


async def _start_learners_again(
    config: Config,
    started: Started,
    placement: Placement,
    timeout_s: float,
    report: Report,
    old: LearnerGroup,
    make_room: Callable[[], Awaitable[None]],
) -> LearnerGroup:
    await started.end(old.handles)
    await make_room()
    with old.at_work():
        group = LearnerGroup(await spawn_learners(config, started, placement), config, old.plan, old.processor)
        await all_ready({learner.name: learner.ready(timeout_s) for learner in group.handles}, report)
    return group


def processor_of(*, on_gpu: bool) -> str:
    return "gpu" if on_gpu else instruction_set()


def _plan(config: Config, *, on_gpu: bool) -> TransferRanks | None:
    chosen = choose_transport(config, on_gpu=on_gpu)
    return None if chosen == "object_store" else transfer_plan(config.server, chosen)


@asynccontextmanager
async def open_learners(
    config: Config, *, report: Report = lambda text: None, on_lease: Callable[[], None] = lambda: None
) -> AsyncIterator[LearnerGroup]:
    """Start only the learners of a run, for supervised steps. `on_lease` is called before they load a model."""
    timeout_s = config.server.place_timeout_s + config.server.start_timeout_s
    async with _session(config, report) as started:
        config, placement, on_gpu = await _reserve(config, started, report, with_servers=False)
        on_lease()
        handles = await spawn_learners(config, started, placement)
        await all_ready({handle.name: handle.ready(timeout_s) for handle in handles}, report)
        yield LearnerGroup(handles, config, processor=processor_of(on_gpu=on_gpu))
