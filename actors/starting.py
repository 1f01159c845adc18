"""Starts, ends, restores and inspects the actors of a run; used by `rayapp.driver.cluster`.

`Started`, one per run in the driver, keeps actors in the order of their start, and ends them in reverse. The `*Member`
classes are those of `rayapp.driver.supervision`: Ray restarts the process behind the same handle, and a member restores
its state.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.handles import (
    Handle,
    LearnerHandle,
    ModelServerHandle,
    RolloutWorkerHandle,
    SandboxPoolHandle,
    VllmServerHandle,
    answer,
)
from actors.own_ray import server_names
from actors.placement import Placement
from actors.spawn import GpuShare, Role, kill, name_is_free, restart, spawn
from rayapp.config.config import Config
from rayapp.config.other_models import ModelServerSection
from rayapp.core.errors import DeadlineError, ProcessDiedError, RayappError, first_error
from rayapp.core.names import all_given

DUMP_TIMEOUT_S = 60.0
ONE_DUMP_TIMEOUT_S = 10.0


async def dump_stacks() -> str:
    """Return the stacks of all living actors of this driver, by name, read by py-spy from outside: they may hang. Never
    raises: where the kernel forbids it, or a node doesn't answer, a note says so."""
    nodes: dict[str, dict[str, int]] = defaultdict(dict)
    job = ray.get_runtime_context().get_job_id()
    for actor in ray._private.state.actors().values():  # noqa: SLF001 - the public API needs a dashboard
        if actor["State"] == "ALIVE" and actor["JobID"] == job:
            nodes[actor["Address"]["NodeID"]][actor["Name"] or actor["ActorID"]] = int(actor["Pid"])
    parts = await asyncio.gather(*(_dump_node(node, pids) for node, pids in nodes.items()))
    return "\n".join(parts)


async def _dump_node(node: str, pids: dict[str, int]) -> str:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    task = ray.remote(stacks_of).options(num_cpus=0, scheduling_strategy=strategy, name="dump stacks")
    try:
        text: str = await answer(task.remote(pids), timeout_s=DUMP_TIMEOUT_S, what=f"dump stacks on node {node[:8]}")
    except RayappError as error:
        return f"=== node {node}: {error}\n"
    return text


def stacks_of(pids: dict[str, int]) -> str:
    return "\n".join(f"=== {name} (pid {pid})\n{_stack(pid)}" for name, pid in sorted(pids.items()))


def _stack(pid: int) -> str:
    py_spy = Path(sys.executable).parent / "py-spy"
    # Blocking mode: py-spy stops the process while it reads its stacks.
    command = [str(py_spy), "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ONE_DUMP_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stack: {error}\n"
    return done.stdout or f"no stack: {done.stderr.strip()}\n"


log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn:
    """Actor that replaces a real actor, for tests and benchmarks of everything else."""

    role: Role
    arguments: tuple[object, ...] = ()  # of its constructor, after the real actor's


StandIns = Mapping[str, StandIn]  # by role, a key of `actors.spawn.ROLES`
NO_STAND_INS: StandIns = MappingProxyType({})


class Started:
    """Actors of a run, in the order of their start. `stand_ins` replace real actors."""

    def __init__(self, stand_ins: StandIns = NO_STAND_INS) -> None:
        self._stand_ins = stand_ins
        self._handles: list[Any] = []
        self.placement: Placement | None = None

    def spawn(self, role: str, name: str, *args: object, share: GpuShare) -> Any:
        stand_in = self._stand_ins.get(role)
        if stand_in is None:
            return spawn(role, name, *args, share=share)
        return spawn(stand_in.role, name, *args, *stand_in.arguments, share=share)

    def add(self, handle: Any) -> Any:
        self._handles.append(handle)
        return handle

    async def end(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._handles.remove(handle)
            kill(handle.actor)

    @property
    def names(self) -> list[str]:
        return [handle.name for handle in self._handles]

    async def close(self) -> None:
        """Ask every actor to end cleanly, then kill those that did not answer. Never raises: it runs in `finally`."""
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


Report = Callable[[str], None]


async def all_ready(ready: Mapping[str, Awaitable[object]], report: Report) -> None:
    """Wait for all actors, by name; the first error cancels the other waits. A DeadlineError names every actor that is
    not ready, because one may only be waiting for another."""
    waiting = set(ready)
    started = time.monotonic()

    async def one(name: str) -> None:
        await ready[name]
        waiting.discard(name)
        report(f"ready: {name} ({time.monotonic() - started:.0f} s)")

    try:
        async with asyncio.TaskGroup() as tasks:
            for name in ready:
                tasks.create_task(one(name), name=f"ready {name}")
    except BaseExceptionGroup as group:
        error = first_error(group)
        if isinstance(error, DeadlineError):
            raise DeadlineError(
                f"{error}. Not ready yet: {', '.join(sorted(waiting))}. Ray's logs show the reason (dashboard, "
                "Actors); if the machine is only slow, raise server.start_timeout_s."
            ) from group
        raise error from group


def spawn_pool(config: Config) -> SandboxPoolHandle:
    return SandboxPoolHandle(spawn("sandbox-pool", "sandbox-pool", config.sandbox, config.run.name), "sandbox-pool")


def spawn_servers(
    config: Config, started: Started, placement: Placement, *, must_sync: bool
) -> tuple[VllmServerHandle, ...]:
    share = placement.server
    return tuple(
        started.add(
            _server(
                config,
                name,
                started.spawn("vllm-server", name, config, index, must_sync, share=share(index)),
            )
        )
        for index, name in enumerate(server_names(config))
    )


def spawn_model_servers(
    config: Config, started: Started, placement: Placement, asked: Sequence[ModelServerSection], key: str
) -> dict[str, ModelServerHandle]:
    """Start the model servers of these sections, which require this key, and return their handles by name."""
    handles: dict[str, ModelServerHandle] = {}
    for section in asked:
        name = f"model-server-{section.name}"
        actor = spawn("model-server", name, config, section, key, share=placement.model_server(section.name))
        handles[section.name] = started.add(ModelServerHandle(actor, name))
    return handles


def _server(config: Config, name: str, actor: Any) -> VllmServerHandle:
    return VllmServerHandle(actor, name, config.group_deadline_s, config.server.sync_timeout_s)


async def spawn_learners(config: Config, started: Started, placement: Placement) -> tuple[LearnerHandle, ...]:
    world_size = config.learner.num_learners
    # Rank 0 listens at this address, possibly on another node than the driver; a single rank does not listen.
    address, port = await placement.address_of_learner(0) if world_size > 1 else ("", 0)
    handles = []
    for rank in range(world_size):
        name = f"learner-{rank}"
        await name_is_free(name)
        actor = started.spawn("learner", name, config, rank, world_size, address, port, share=placement.learner(rank))
        handles.append(started.add(LearnerHandle(actor, name, config.recovery.step_timeout_s)))
    return tuple(handles)


def spawn_rollout_workers(
    config: Config, started: Started, servers: tuple[VllmServerHandle, ...], pool: SandboxPoolHandle
) -> tuple[RolloutWorkerHandle, ...]:
    names = [f"rollout-worker-{index}" for index in range(config.rollout.num_workers)]
    return tuple(
        started.add(
            RolloutWorkerHandle(
                spawn("rollout-worker", name, config, index, servers, pool, all_given()),
                name,
                config.group_deadline_s,
            )
        )
        for index, name in enumerate(names)
    )


@dataclass(frozen=True, slots=True)
class _WatchedActor:
    handle: Handle

    @property
    def name(self) -> str:
        return self.handle.name

    async def incarnation(self, timeout_s: float) -> str:
        return await self.handle.incarnation(timeout_s)

    async def ping(self, timeout_s: float) -> str:
        return await self.handle.ping(timeout_s)

    async def kill(self) -> None:
        await restart(self.handle.actor)


@dataclass(frozen=True, slots=True)
class ServerMember(_WatchedActor):
    """Supervised vLLM server. Without learners (evaluation) it keeps the model's own weights."""

    handle: VllmServerHandle
    start_timeout_s: float
    load_weights: Callable[[VllmServerHandle], Awaitable[None]]

    async def revive(self) -> None:
        await self.handle.ready(self.start_timeout_s)
        await self.load_weights(self.handle)


@dataclass(frozen=True, slots=True)
class ModelServerMember(_WatchedActor):
    """Supervised server of a model that is not trained. Its clients repeat their requests until it is back."""

    handle: ModelServerHandle
    start_timeout_s: float
    address: tuple[str, int]

    @property
    def url(self) -> str:
        return "http://{}:{}/v1".format(*self.address)

    async def revive(self) -> None:
        await self.handle.ready(self.start_timeout_s, self.address)


@dataclass(frozen=True, slots=True)
class WorkerMember(_WatchedActor):
    """Supervised rollout worker. Its local sandboxes end with it; the pool takes leased sandboxes back."""

    handle: RolloutWorkerHandle
    start_timeout_s: float
    pool: SandboxPoolHandle

    async def revive(self) -> None:
        try:
            await self.pool.reclaim(self.handle.name)
        except (ProcessDiedError, DeadlineError) as error:
            # The pool is also being replaced, and a new pool has no leases.
            log.warning("%s has no leases to reclaim: %s", self.handle.name, error)
        await self.handle.ready(self.start_timeout_s)


@dataclass(frozen=True, slots=True)
class PoolMember(_WatchedActor):
    """Supervised sandbox pool. At its start a new pool ends the sandboxes of the previous one."""

    handle: SandboxPoolHandle
    timeout_s: float

    async def ping(self, timeout_s: float) -> str:
        return await self.handle.incarnation(timeout_s)

    async def revive(self) -> None:
        await self.handle.ready(self.timeout_s)
