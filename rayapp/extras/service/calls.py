"""The calls in progress of the sandbox service: which clients hung up, and Prometheus' metrics of all calls."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rayapp.core.errors import SandboxDeadlineError
from rayapp.sandbox.pool.pool import LeasePool

CALL_HEADER = "x-rayapp-call"  # Header with a call's id, which a client can't set.
T = TypeVar("T")
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Calls:
    def __init__(self, pool: LeasePool) -> None:
        self._pool = pool
        self._hangups: dict[str, asyncio.Event] = {}  # Id of a call -> event that is set when its client hangs up.
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("rayapp_sandbox_requests", "Answered requests", ("route", "status"), registry=registry)
        self._seconds = Histogram(
            "rayapp_sandbox_request_seconds", "Seconds to answer", buckets=_BUCKETS_S, registry=registry
        )
        self._counts = Gauge("rayapp_sandbox_pool", "Counts of the pool", ("name",), registry=registry)

    @contextmanager
    def calling(self) -> Iterator[tuple[str, asyncio.Event]]:
        """Yield a call's id, and the event to set when the client hangs up."""
        call_id, hangup = secrets.token_hex(16), asyncio.Event()
        self._hangups[call_id] = hangup
        try:
            yield call_id, hangup
        finally:
            hangup.set()
            del self._hangups[call_id]

    async def unless_hung_up(self, call_id: str, work: Coroutine[object, object, T]) -> T:
        """Return the result of a call's work, or cancel it if the client hangs up, which gives its sandbox back: a
        client that tries again would otherwise hold one more sandbox at each try. Raises SandboxDeadlineError then."""
        hangup = self._hangups.get(call_id) or asyncio.Event()
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(hangup.wait())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise SandboxDeadlineError("the client hung up before its code ended")
        finally:
            leaving.cancel()
            working.cancel()
            await asyncio.wait({working, leaving})

    def count(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route=route, status=str(status)).inc()
        self._seconds.observe(seconds)

    def metrics(self) -> bytes:
        for name, value in self._pool.stats().items():
            self._counts.labels(name=name.removeprefix("sandbox/")).set(value)
        return generate_latest(self._registry)
