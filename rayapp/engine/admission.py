"""Admits requests to an engine: in cohorts that start together, and within a limit of concurrent requests.

`ConcurrencyLimit` finds the limit on CPUs: it doubles until vLLM first preempts, then grows slowly, and is lowered at
preemptions. On GPUs that would take minutes: there it is `server.max_num_seqs`. `Gate` admits the oldest group first,
because a step waits for it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rayapp.core.types import RequestId, SamplingParams

log = logging.getLogger(__name__)


class Request:
    """A request that waits for its cohort."""

    def __init__(self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.pictures: Sequence[Any] = ()  # of the prompt, opened
        self.created_s = time.monotonic()
        # Output queue of the engine: set when the request starts, cancelled when the caller is gone.
        self.queue: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class Cohorts:
    """Collects requests until their cohort is complete, then starts it, after `patience_s` also incomplete: when a
    worker dies, its groups are issued again without their cohort."""

    def __init__(self, start: Callable[[list[Request]], Awaitable[None]], *, patience_s: float) -> None:
        self._start = start
        self._patience_s = patience_s
        self._waiting: list[Request] = []

    async def admit(self, request: Request, size: int) -> Any:
        """Start a request with its cohort of `size`, in the order of ids. Return the engine's output queue for it."""
        self._waiting.append(request)
        try:
            if len(self._waiting) < size:
                await asyncio.wait([request.queue], timeout=self._patience_s)
                if request in self._waiting:
                    log.warning(
                        "the cohort of %s starts with %d of its %d requests",
                        request.request_id,
                        len(self._waiting),
                        size,
                    )
            if request in self._waiting:
                cohort, self._waiting = sorted(self._waiting, key=lambda request: request.request_id), []
                # Shield the start: if this request is cancelled, the cohort's other requests must still start.
                await asyncio.shield(self._start_all(cohort))
            return await request.queue
        except asyncio.CancelledError:
            request.queue.cancel()
            raise
        finally:
            if request in self._waiting:
                self._waiting.remove(request)

    async def _start_all(self, cohort: list[Request]) -> None:
        try:
            await self._start(cohort)
        except Exception as error:  # every request of the cohort must get the error
            for request in cohort:
                if not request.queue.done():
                    request.queue.set_exception(error)


HOLD_ABOVE = 0.95  # of the KV cache; above it no request starts, as running sequences still grow
GROW_BELOW = 0.85
BACK_OFF = 0.7
GROWTH_PER_ROUND = 4.0  # of the limit, after the first preemption, for each limit's number of ended requests


class ConcurrencyLimit:
    """Limit of concurrent requests, adapted by additive increase and multiplicative decrease. Without `backs_off` it
    stays, and preemption is left to the engine."""

    def __init__(self, *, ceiling: int, start: int = 16, backs_off: bool = True) -> None:
        self._backs_off = backs_off
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
        """True if one more request may start; always without one in flight."""
        return in_flight == 0 or (in_flight < self.limit and self._kv_used < HOLD_ABOVE)

    def was_given(self, in_flight: int) -> None:
        """Raise the limit to the requests in flight, after a cohort started as a whole, until the cache overflows."""
        self._limit = min(self._ceiling, max(self._limit, float(in_flight)))

    def observe(self, *, kv_used: float, num_preempted: int, in_flight: int) -> None:
        """Update the limit after a step: share of the KV cache in use, sequences preempted in this step."""
        self._kv_used = kv_used
        if num_preempted and self._num_to_settle == 0 and self._backs_off:
            # Take the number of requests in flight if it is below the limit: a limit that was not reached did not cause
            # the preemption.
            self._limit = max(1.0, min(self._limit, in_flight) * BACK_OFF)
            self._is_probing = False
            self.num_back_offs += 1
            # The requests in flight still overfill the cache: ignore preemptions until as many requests have ended.
            self._num_to_settle = in_flight

    def ended(self, *, is_wanted: bool) -> None:
        """Count the end of a request, which may raise the limit if others wait."""
        self._num_to_settle = max(0, self._num_to_settle - 1)
        if is_wanted and self._num_to_settle == 0 and self._kv_used < GROW_BELOW:
            step = 1.0 if self._is_probing else GROWTH_PER_ROUND / self._limit
            self._limit = min(self._ceiling, self._limit + step)


def limit_of(max_num_seqs: int, *, on_gpu: bool) -> ConcurrencyLimit:
    start = {"start": max_num_seqs} if on_gpu else {}
    return ConcurrencyLimit(ceiling=max_num_seqs, backs_off=not on_gpu, **start)


class Gate:
    def __init__(self, limit: ConcurrencyLimit) -> None:
        self._limit = limit
        self._in_flight = 0
        self._waiting: list[tuple[RequestId, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def num_waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._waiting)

    @asynccontextmanager
    async def enter(self, order: RequestId) -> AsyncIterator[None]:
        """Wait for a place below the limit, and hold it during the block; the smallest `order` comes first."""
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
        """Count a request as in flight during the block, without waiting."""
        self._in_flight += 1
        self._limit.was_given(self._in_flight)
        try:
            yield
        finally:
            self._leave()

    def observe(self, *, kv_used: float, num_preempted: int) -> None:
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
        """Return the limit, how often it was lowered, and the waiting requests."""
        return {
            "concurrency_limit": float(self._limit.limit),
            "back_offs": float(self._limit.num_back_offs),
            "gate_waiting": float(self.num_waiting),
        }
