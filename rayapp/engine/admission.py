"""Admits requests to an engine: in cohorts that start together, and the oldest group first, because a step waits for
it."""

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


class Gate:
    """Admits at most `limit` requests at once, the oldest group first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kv_used = 0.0
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
        try:
            yield
        finally:
            self._leave()

    def observe(self, kv_used: float) -> None:
        """Note the share of the KV cache in use after a step."""
        self._kv_used = kv_used
        self._let_in()

    def _leave(self) -> None:
        self._in_flight -= 1
        self._let_in()

    def _admits(self) -> bool:
        return self._in_flight == 0 or (self._in_flight < self._limit and self._kv_used < HOLD_ABOVE)

    def _let_in(self) -> None:
        while self._waiting and self._admits():
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                self._in_flight += 1
                future.set_result(None)

    def scalars(self) -> dict[str, float]:
        return {"gate_waiting": float(self.num_waiting)}
