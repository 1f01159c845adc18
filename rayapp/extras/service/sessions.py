"""Assigns a sandbox to each MCP session.

A session's sandbox is leased at its first call and given back when the client ends the session, when its time to live
is over, or when the server stops.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from rayapp.core.errors import SandboxGoneError
from rayapp.core.protocols import Sandbox, SandboxLease, SandboxSource
from rayapp.core.types import SandboxSpec

log = logging.getLogger(__name__)
_MAX_REMEMBERED = 10_000  # Sessions that are remembered, with ended ones, because clients that vanish never end theirs.


@dataclass(slots=True)
class _Bound:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: SandboxLease | None = None
    sandbox: Sandbox | None = None
    is_over: bool = False
    expiry: asyncio.TimerHandle | None = None
    num_executions: int = 0


class Sessions:
    """The sessions of one server and their sandboxes."""

    def __init__(self, sandboxes: SandboxSource, *, lease_timeout_s: float) -> None:
        self.sandboxes = sandboxes
        self._lease_timeout_s = lease_timeout_s
        self._bound: dict[str, _Bound] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def num_bound(self) -> int:
        return sum(bound.sandbox is not None for bound in self._bound.values())

    def once(self, spec: SandboxSpec) -> SandboxLease:
        return self.sandboxes.lease(spec, timeout_s=self._lease_timeout_s)

    async def sandbox(self, session: str, spec: SandboxSpec, *, ttl_s: float) -> Sandbox:
        """Return the session's sandbox.

        Raises SandboxGoneError: it has ended, and the session gets no other, since its variables are lost;
        SandboxError.
        """
        if len(self._bound) > _MAX_REMEMBERED:
            self._bound = {key: bound for key, bound in self._bound.items() if not bound.is_over}
        bound = self._bound.setdefault(session, _Bound())
        async with bound.lock:
            if bound.is_over:
                raise SandboxGoneError(f"the sandbox of MCP session {session[:8]} has ended: open a new session")
            if bound.sandbox is None:
                lease = self.once(spec)
                bound.sandbox = await lease.__aenter__()
                bound.lease = lease
                bound.expiry = asyncio.get_running_loop().call_later(ttl_s, self._expire, session)
            return bound.sandbox

    def count(self, session: str) -> int:
        """Count an execution, and return its number in the session, from 1."""
        bound = self._bound[session]
        bound.num_executions += 1
        return bound.num_executions

    async def end(self, session: str) -> None:
        bound = self._bound.pop(session, None)
        if bound is not None:
            await self._give_back(bound)

    async def lose(self, session: str) -> None:
        """End the lease of a sandbox that is dead or expired. Later calls of the session raise SandboxGoneError."""
        bound = self._bound.get(session)
        if bound is not None:
            await self._give_back(bound)

    async def close(self) -> None:
        await asyncio.gather(*(self.end(session) for session in tuple(self._bound)))
        if self._ending:
            await asyncio.wait(self._ending, timeout=10.0)

    def _expire(self, session: str) -> None:
        task = asyncio.create_task(self.lose(session), name=f"end of session {session}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _give_back(self, bound: _Bound) -> None:
        bound.is_over = True
        lease, bound.lease, bound.sandbox = bound.lease, None, None
        if bound.expiry is not None:
            bound.expiry.cancel()
        if lease is not None:
            try:
                await asyncio.shield(lease.__aexit__(None, None, None))
            except Exception as error:  # boundary: if returning the lease fails, the pool ends the sandbox
                log.warning("a session's sandbox was not returned to the pool: %s", error)
