"""What `rayapp.driver.supervision` looks after: servers, rollout workers and the sandbox pool, each with its way back
to work.

Ray starts the process again behind the same handle (`max_restarts` in `actors.spawn`), so nobody has to be told a new
address. What the process held is what a member restores.
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
class _Member:
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
class ServerMember(_Member):
    """A vLLM server. Without learners (evaluation) `load_weights` does nothing: it serves the model's own."""

    handle: VllmServerHandle
    start_timeout_s: float
    load_weights: Callable[[VllmServerHandle], Awaitable[None]]

    async def revive(self) -> None:
        await self.handle.ready(self.start_timeout_s)
        await self.load_weights(self.handle)


@dataclass(frozen=True, slots=True)
class ModelServerMember(_Member):
    """A server of a model that is not trained. Who asks it waits: requests are repeated."""

    handle: ModelServerHandle
    start_timeout_s: float
    address: tuple[str, int]

    @property
    def url(self) -> str:
        """For who takes it as OpenAI's clients do."""
        return "http://{}:{}/v1".format(*self.address)

    async def revive(self) -> None:
        await self.handle.ready(self.start_timeout_s, self.address)


@dataclass(frozen=True, slots=True)
class WorkerMember(_Member):
    """A rollout worker. Its sandboxes ended with it; what it had borrowed serves others."""

    handle: RolloutWorkerHandle
    start_timeout_s: float
    pool: SandboxPoolHandle

    async def revive(self) -> None:
        try:
            await self.pool.reclaim(self.handle.name)
        except (ProcessDiedError, DeadlineError) as error:
            # The pool is being replaced too, and a new one has lent nothing to anybody.
            log.warning("%s: nothing to reclaim: %s", self.handle.name, error)
        await self.handle.ready(self.start_timeout_s)


@dataclass(frozen=True, slots=True)
class PoolMember(_Member):
    """The sandbox pool. A new one ends what the one before it made, at its start."""

    handle: SandboxPoolHandle
    make_ready: Callable[[], Awaitable[None]]

    async def ping(self, timeout_s: float) -> str:
        return await self.handle.incarnation(timeout_s)

    async def revive(self) -> None:
        await self.make_ready()
