"""Members of `rayapp.driver.supervision`: servers, rollout workers and the sandbox pool, and how each is restored.

Ray restarts the process behind the same handle (`max_restarts` in `actors.spawn`), so its callers keep their handles. A
member restores the state of the process.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors.handles import Handle, ModelServerHandle, RolloutWorkerHandle, SandboxPoolHandle, VllmServerHandle
from actors.spawn import restart
from rayapp.core.errors import DeadlineError, ProcessDiedError

log = logging.getLogger(__name__)


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
    """A vLLM server. Without learners (evaluation) `load_weights` does nothing: it serves the model's own weights."""

    handle: VllmServerHandle
    start_timeout_s: float
    load_weights: Callable[[VllmServerHandle], Awaitable[None]]

    async def revive(self) -> None:
        await self.handle.ready(self.start_timeout_s)
        await self.load_weights(self.handle)


@dataclass(frozen=True, slots=True)
class ModelServerMember(_WatchedActor):
    """A server of a model that is not trained. Its clients repeat their requests until it is back."""

    handle: ModelServerHandle
    start_timeout_s: float
    address: tuple[str, int]

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients."""
        return "http://{}:{}/v1".format(*self.address)

    async def revive(self) -> None:
        await self.handle.ready(self.start_timeout_s, self.address)


@dataclass(frozen=True, slots=True)
class WorkerMember(_WatchedActor):
    """A rollout worker. Its local sandboxes end with it; the pool takes leased ones back."""

    handle: RolloutWorkerHandle
    start_timeout_s: float
    pool: SandboxPoolHandle

    async def revive(self) -> None:
        try:
            await self.pool.reclaim(self.handle.name)
        except (ProcessDiedError, DeadlineError) as error:
            # The pool is being replaced too, and a new one has no leases.
            log.warning("%s: nothing to reclaim: %s", self.handle.name, error)
        await self.handle.ready(self.start_timeout_s)


@dataclass(frozen=True, slots=True)
class PoolMember(_WatchedActor):
    """The sandbox pool. At its start a new one ends the sandboxes of the previous one."""

    handle: SandboxPoolHandle
    make_ready: Callable[[], Awaitable[None]]

    async def ping(self, timeout_s: float) -> str:
        return await self.handle.incarnation(timeout_s)

    async def revive(self) -> None:
        await self.make_ready()
