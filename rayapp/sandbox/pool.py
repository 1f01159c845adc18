"""Who may use a sandbox now: leases, first come first served, bounded, with a deadline and a time to live.

Pure asyncio, one event loop, no Ray; the sandbox-pool actor wraps it. It hands out permission, not data: code and
outputs go from a worker to its sandbox directly, so the pool never becomes the bottleneck.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rayapp.errors import SandboxUnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to use one sandbox."""

    lease_id: int
    holder: str
    """Who asked, for the statistics and to reclaim what a dead caller held."""
    expires_at: float
    """On the pool's clock, in seconds."""


class LeasePool:
    """At most `max_leases` leases at a time.

    Args:
        max_leases: sandboxes in use at once.
        max_waiting: callers in the queue.
        ttl_s: a lease not released by then is reclaimed.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, max_leases: int, max_waiting: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_leases = max_leases
        self._max_waiting = max_waiting
        self._ttl_s = ttl_s
        self._clock = clock
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._queue: deque[tuple[str, asyncio.Future[Lease]]] = deque()
        self._num_granted = 0
        self._num_reclaimed = 0

    async def acquire(self, holder: str, *, timeout_s: float) -> Lease:
        """A lease, once it is this caller's turn.

        Raises:
            SandboxUnavailableError: none was free within timeout_s, or too many wait already.
        """
        self.reclaim_expired()
        if len(self._leases) < self._max_leases and not self._queue:
            return self._grant(holder)
        if len(self._queue) >= self._max_waiting:
            raise SandboxUnavailableError(
                f"{len(self._queue)} callers wait for a sandbox already, the limit is sandbox.max_waiting"
            )
        turn: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        entry = (holder, turn)
        self._queue.append(entry)
        try:
            # Not wait_for: on 3.11 it swallows a cancellation that arrives together with the grant.
            async with asyncio.timeout(timeout_s):
                return await turn
        except TimeoutError:
            self._give_up(entry)
            raise SandboxUnavailableError(
                f"no sandbox was free within {timeout_s:g} s: {len(self._leases)} of {self._max_leases} leased, "
                f"{len(self._queue)} waiting. Raise sandbox.max_leases or lower the tasks' timeout_s."
            ) from None
        except asyncio.CancelledError:
            self._give_up(entry)
            raise

    def _give_up(self, entry: tuple[str, asyncio.Future[Lease]]) -> None:
        """The caller keeps neither its place nor a lease granted in the moment it gave up."""
        turn = entry[1]
        if entry in self._queue:
            self._queue.remove(entry)
        elif turn.done() and not turn.cancelled():
            self.release(turn.result().lease_id)

    def release(self, lease_id: int) -> None:
        """Give a lease back. Releasing it twice, or after it was reclaimed, is no error."""
        if self._leases.pop(lease_id, None) is not None:
            self._serve_queue()

    def reclaim_expired(self) -> int:
        """Take back leases past their time to live. Returns how many."""
        now = self._clock()
        expired = [lease.lease_id for lease in self._leases.values() if lease.expires_at <= now]
        return self._reclaim(expired)

    def reclaim_of(self, holder: str) -> int:
        """Take back every lease of a caller that is gone. Returns how many."""
        return self._reclaim([lease.lease_id for lease in self._leases.values() if lease.holder == holder])

    def _reclaim(self, lease_ids: list[int]) -> int:
        self._num_reclaimed += len(lease_ids)
        for lease_id in lease_ids:
            self.release(lease_id)
        return len(lease_ids)

    def _grant(self, holder: str) -> Lease:
        lease = Lease(lease_id=next(self._ids), holder=holder, expires_at=self._clock() + self._ttl_s)
        self._leases[lease.lease_id] = lease
        self._num_granted += 1
        return lease

    def _serve_queue(self) -> None:
        while self._queue and len(self._leases) < self._max_leases:
            holder, turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(self._grant(holder))

    def stats(self) -> dict[str, float]:
        """`sandbox/*` numbers."""
        return {
            "sandbox/leased": float(len(self._leases)),
            "sandbox/waiting": float(len(self._queue)),
            "sandbox/granted": float(self._num_granted),
            "sandbox/reclaimed": float(self._num_reclaimed),
        }
