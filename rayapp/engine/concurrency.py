"""How many requests an engine works on at once: found while it runs, so that nobody has to tune a number.

Too few leave the device idle; too many overfill the KV cache, and vLLM then throws out sequences that it computes again
later (preemption). `ConcurrencyLimit` is the arithmetic: it doubles until the first preemption, then adds slowly, and
backs off when sequences are thrown out. `Gate` lets requests pass by it, the oldest group first, as a step waits for
that one. Used by `VllmEngine`; pure asyncio, no vLLM.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

HOLD_ABOVE = 0.95
"""Share of the KV cache in use past which nothing new starts: what runs still grows."""
GROW_BELOW = 0.85
BACK_OFF = 0.7
GROWTH_PER_ROUND = 4.0
"""Growth after the first preemption: the limit rises by this each time that as many requests as it have ended."""


class ConcurrencyLimit:
    """Additive increase, multiplicative decrease.

    Args:
        ceiling: `server.max_num_seqs`: more never run at once, whatever the room.
        start: where it begins.
    """

    def __init__(self, *, ceiling: int, start: int = 16) -> None:
        self._ceiling = float(ceiling)
        self._limit = float(min(start, ceiling))
        self._is_probing = True
        self._kv_used = 0.0
        self._num_to_settle = 0
        self.num_back_offs = 0

    @property
    def limit(self) -> int:
        return int(self._limit)

    def admits(self, in_flight: int) -> bool:
        """True if one more request may start. With nothing in flight it always may, or nothing would ever change."""
        return in_flight == 0 or (in_flight < self.limit and self._kv_used < HOLD_ABOVE)

    def was_given(self, in_flight: int) -> None:
        """Raise the limit to what is in flight, as a cohort starts whole. It stands until the cache overflows."""
        self._limit = min(self._ceiling, max(self._limit, float(in_flight)))

    def observe(self, *, kv_used: float, num_preempted: int, in_flight: int) -> None:
        """Learn from a step of the engine; called after each.

        Args:
            kv_used: share of the KV cache in use.
            num_preempted: sequences thrown out in this step.
        """
        self._kv_used = kv_used
        if num_preempted and self._num_to_settle == 0:
            # Back off from what was in flight: a limit that was never reached did not cause the preemption.
            self._limit = max(1.0, min(self._limit, in_flight) * BACK_OFF)
            self._is_probing = False
            self.num_back_offs += 1
            # Requests admitted before overfill the cache now: their preemptions say nothing about the new limit.
            self._num_to_settle = in_flight

    def ended(self, *, is_wanted: bool) -> None:
        """A request has ended.

        Args:
            is_wanted: others wait for room; a limit that holds nobody back is no reason to raise it.
        """
        self._num_to_settle = max(0, self._num_to_settle - 1)
        if is_wanted and self._num_to_settle == 0 and self._kv_used < GROW_BELOW:
            step = 1.0 if self._is_probing else GROWTH_PER_ROUND / self._limit
            self._limit = min(self._ceiling, self._limit + step)


class Gate:
    """Lets requests into the engine as the limit allows; the others wait."""

    def __init__(self, limit: ConcurrencyLimit) -> None:
        self._limit = limit
        self._in_flight = 0
        self._waiting: list[tuple[tuple[object, ...], int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def num_waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._waiting)

    @asynccontextmanager
    async def seat(self, order: tuple[object, ...]) -> AsyncIterator[None]:
        """Wait for room, and hold it while the block runs; the smallest `order` comes first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._order), future))
        self._let_in()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Hold room without waiting for it."""
        self._in_flight += 1
        self._limit.was_given(self._in_flight)
        try:
            yield
        finally:
            self._leave()

    def observe(self, *, kv_used: float, num_preempted: int) -> None:
        """See `ConcurrencyLimit.observe`."""
        self._limit.observe(kv_used=kv_used, num_preempted=num_preempted, in_flight=self._in_flight)
        self._let_in()

    def _leave(self) -> None:
        self._in_flight -= 1
        self._limit.ended(is_wanted=self.num_waiting > 0)
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._limit.admits(self._in_flight):
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                self._in_flight += 1
                future.set_result(None)

    def scalars(self) -> dict[str, float]:
        """The limit, how often it backed off, and who waits."""
        return {
            "concurrency_limit": float(self._limit.limit),
            "back_offs": float(self._limit.num_back_offs),
            "gate_waiting": float(self.num_waiting),
        }
