"""Starting the actors of a run, role by role: who gets which seat, name and arguments. Called by
`rayapp.driver.cluster`.

Every function starts processes and returns their handles at once; `all_ready` waits for them. Nothing here ends any:
`Started` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray

from actors.handles import (
    LearnerHandle,
    ModelServerHandle,
    RolloutWorkerHandle,
    SandboxPoolHandle,
    SandboxReaperHandle,
    VllmServerHandle,
)
from actors.setup.placement import Placement
from actors.setup.session import RaySession, server_names
from actors.setup.started import Started
from actors.spawn import kill_named, name_is_free, spawn
from rayapp.config.config import Config
from rayapp.config.model_servers import ModelServerSection
from rayapp.config.sandbox import DaytonaConfig, E2BConfig
from rayapp.core.errors import DeadlineError, first_error
from rayapp.core.names.given import all_given

Report = Callable[[str], None]
REAPER_NAME_ATTEMPTS = 100


async def all_ready(ready: Mapping[str, Awaitable[object]], report: Report) -> None:
    """Wait for all of them, by name; the first error ends the others.

    Args:
        report: told in a line who is ready, and after how long.
    Raises:
        DeadlineError: somebody is not ready in time. Names all who are not: one may only wait for another.
    """
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
                f"{error}. Not ready yet: {', '.join(sorted(waiting))}. What they wait for is in Ray's logs "
                "(dashboard, Actors); if the machine is only slow, raise server.start_timeout_s or "
                "cluster.start_timeout_s."
            ) from group
        raise error from group


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


def spawn_servers(
    config: Config, started: Started, placement: Placement, *, must_sync: bool
) -> tuple[VllmServerHandle, ...]:
    return tuple(
        started.add(_server(config, name, started.server(name, config, index, must_sync, seat=placement.server(index))))
        for index, name in enumerate(server_names(config))
    )


def spawn_model_servers(
    config: Config, started: Started, placement: Placement, asked: Sequence[ModelServerSection]
) -> dict[str, ModelServerHandle]:
    """By name, those of these sections."""
    handles: dict[str, ModelServerHandle] = {}
    for section in asked:
        name = f"model-server-{section.name}"
        actor = spawn("model-server", name, config, section, seat=placement.model_server(section.name))
        handles[section.name] = started.add(ModelServerHandle(actor, name))
    return handles


def running_servers(config: Config) -> tuple[VllmServerHandle, ...]:
    """The servers of a run that goes on in this namespace."""
    return tuple(_server(config, name, ray.get_actor(name)) for name in server_names(config))


def _server(config: Config, name: str, actor: Any) -> VllmServerHandle:
    return VllmServerHandle(actor, name, config.server.request_timeout_s, config.server.sync_timeout_s)


async def spawn_learners(config: Config, started: Started, placement: Placement) -> tuple[LearnerHandle, ...]:
    world_size = config.learner.num_learners
    # Rank 0 listens there, and may be on another node than the driver. Alone it does not.
    address, port = await placement.address_of_learner(0) if world_size > 1 else ("", 0)
    handles = []
    for rank in range(world_size):
        name = f"learner-{rank}"
        await name_is_free(name)
        actor = started.learner(name, config, rank, world_size, address, port, seat=placement.learner(rank))
        handles.append(started.add(LearnerHandle(actor, name, config.learner.step_timeout_s)))
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
                config.rollout.group_deadline_s,
            )
        )
        for index, name in enumerate(names)
    )
