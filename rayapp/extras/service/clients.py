"""Clients of the sandbox service: their keys, limits and metrics.

    request -> key -> client name -> at most `max_leases` sandboxes at a time -> the pool, which serves clients in turn

`app._Guard` finds the client of a request and passes its name on in `CLIENT_HEADER`. A client can't set this header.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rayapp.core.errors import ConfigError, SandboxDeadlineError, SandboxUnavailableError
from rayapp.core.protocols import Sandbox, SandboxLease
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.pool.client import PoolClient
from rayapp.sandbox.pool.pool import LeasePool

CLIENT_HEADER = "x-rayapp-client"
CALL_HEADER = "x-rayapp-call"
"""Header with the id of a call, by which `Clients.unless_hung_up` finds out that its client is gone."""
ONLY_CLIENT = "default"
"""Name of the client if the service has only one key."""
T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_CLIENTS = 1000
_SHORTEST_KEY_CHARS = 16
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


def read_keys(file: Path) -> dict[str, str]:
    """Return the keys in a file of clients, by client name. Each line is `NAME KEY`; `#` starts a comment.

    Raises:
        ConfigError: a line is malformed, a name or key is repeated, a key is shorter than 16 characters, or the file
            names no client.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{file}, line {number}"
        if len(words) != 2:
            raise ConfigError(f"{where}: the line must have the form NAME KEY, but it has {len(words)} words")
        if not _NAME.fullmatch(words[0]):
            raise ConfigError(f"{where}: the name must have 1 to 64 letters, digits or characters of ._-")
        if len(words[1]) < _SHORTEST_KEY_CHARS:
            raise ConfigError(f"{where}: the key must have at least {_SHORTEST_KEY_CHARS} characters")
        if words[0] in found or words[1] in found.values():
            which = "name" if words[0] in found else "key"
            raise ConfigError(f"{where}: an earlier line has the same {which}. Give each client its own")
        found[words[0]] = words[1]
    if not found:
        raise ConfigError(f"{file} names no client: write lines of the form NAME KEY")
    return found


class Clients:
    """Finds the client of a request, and leases sandboxes on its behalf.

    Args:
        keys: keys by client name. If there are none, requests need no key, and each address counts as one client.
        sandboxes: the service's connection to the pool, which all clients share.
        pool: the pool itself, for its counts.
        max_leases: maximum number of sandboxes of one client at the same time; 0: as many as the pool has.
    """

    def __init__(self, keys: Mapping[str, str], sandboxes: PoolClient, pool: LeasePool, *, max_leases: int = 0) -> None:
        self._keys = {name: key.encode() for name, key in keys.items()}
        self._sandboxes = sandboxes
        self._pool = pool
        self._max_leases = max_leases or pool.max_leases
        self._clients: dict[str, Client] = {}
        self._metrics = _Metrics(pool)
        self._hangups: dict[str, asyncio.Event] = {}
        """Id of a call in progress -> event that is set when its client hangs up."""

    @contextmanager
    def calling(self) -> Iterator[tuple[str, asyncio.Event]]:
        """Context manager of one call. Yield the call's id, and the event to set when the client hangs up."""
        call_id, hangup = secrets.token_hex(16), asyncio.Event()
        self._hangups[call_id] = hangup
        try:
            yield call_id, hangup
        finally:
            hangup.set()
            del self._hangups[call_id]

    async def unless_hung_up(self, call_id: str, work: Coroutine[object, object, T]) -> T:
        """Return the result of a call's work. If the client hangs up, cancel the work, which gives its sandbox back:
        a client that gives up and tries again would otherwise hold one more sandbox at each try.

        Raises:
            SandboxDeadlineError: the client hung up.
        """
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

    def named(self, given_keys: tuple[str, ...], address: str) -> str | None:
        """Return the name of the client that has one of these keys; None if no client has one: refuse the request."""
        if not self._keys:
            return address
        encoded = [key.encode() for key in given_keys]
        names = [name for name, key in self._keys.items() for given in encoded if hmac.compare_digest(key, given)]
        return names[0] if names else None

    def of(self, name: str) -> Client:
        """Return the client of this name."""
        client = self._clients.get(name)
        if client is None:
            self._forget_idle()
            own = replace(self._sandboxes, holder=f"{self._sandboxes.holder}/{name}")
            leased = self._metrics.leased.labels(client=self._label(name))
            client = self._clients[name] = Client(own, self._max_leases, leased)
        return client

    def metrics(self) -> bytes:
        """Return the metrics of clients and pool in Prometheus' text format."""
        return self._metrics.text()

    def count(self, name: str, route: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self._metrics.answered(self._label(name), route, status, seconds)

    def rest(self) -> None:
        """Stop the heartbeats of all clients to the pool. Called when the service ends."""
        for client in self._clients.values():
            client.sandboxes.rest()

    def _label(self, name: str) -> str:
        """Return the client's label in the metrics. Clients known only by address share one label, because their number
        is unlimited.
        """
        return name if self._keys else "any"

    def _forget_idle(self) -> None:
        """Remove idle clients if there are more than 1,000. Without keys each address is a client, so their number is
        unlimited.
        """
        if len(self._clients) >= _MAX_CLIENTS:
            idle = [name for name, client in self._clients.items() if not client.num_users]
            if not idle:
                raise SandboxUnavailableError(
                    f"{_MAX_CLIENTS} clients use sandboxes at once, which is the maximum: try again later"
                )
            self._clients.pop(idle[0]).sandboxes.rest()


class Client:
    """One client's access to the pool, with a limit of its own, as a `core.protocols.SandboxSource`."""

    def __init__(self, sandboxes: PoolClient, max_leases: int, leased: Gauge) -> None:
        self.sandboxes = sandboxes
        self.places = asyncio.Semaphore(max_leases)
        self.leased = leased
        self.num_users = 0
        """Number of leases that the client holds or waits for."""

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> SandboxLease:
        """Lease a sandbox. A client at its limit waits until it gives a sandbox back."""
        return _ClientLease(self, spec, timeout_s)

    @asynccontextmanager
    async def sandbox(self, spec: SandboxSpec, timeout_s: float) -> AsyncIterator[Sandbox]:
        self.num_users += 1
        try:
            started = time.monotonic()
            try:
                async with asyncio.timeout(timeout_s):
                    await self.places.acquire()
            except TimeoutError:
                raise SandboxUnavailableError(
                    f"{self.sandboxes.holder} already holds as many sandboxes as a client may have, and returned none "
                    f"within {timeout_s:g} s. Return one, or raise --max-per-client"
                ) from None
            try:
                left_s = max(0.001, timeout_s - (time.monotonic() - started))
                async with self.sandboxes.lease(spec, timeout_s=left_s) as sandbox:
                    self.leased.inc()
                    try:
                        yield sandbox
                    finally:
                        self.leased.dec()
            finally:
                self.places.release()
        finally:
            self.num_users -= 1


class _ClientLease:
    """A lease on behalf of a client, as a `core.protocols.SandboxLease`."""

    def __init__(self, client: Client, spec: SandboxSpec, timeout_s: float) -> None:
        self._held = client.sandbox(spec, timeout_s)

    async def __aenter__(self) -> Sandbox:
        return await self._held.__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        await self._held.__aexit__(None, None, None)


class _Metrics:
    """The service's Prometheus metrics: requests by client, and the pool's metrics at the time of the scrape."""

    def __init__(self, pool: LeasePool) -> None:
        self._pool = pool
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "rayapp_sandbox_requests", "Answered requests", ("client", "route", "status"), registry=registry
        )
        self._seconds = Histogram(
            "rayapp_sandbox_request_seconds", "Seconds to answer", ("client",), buckets=_BUCKETS_S, registry=registry
        )
        self.leased = Gauge("rayapp_sandbox_leased_by", "Sandboxes held", ("client",), registry=registry)
        self._counts = Gauge("rayapp_sandbox_pool", "Counts of the pool", ("name",), registry=registry)

    def answered(self, client: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(client=client, route=route, status=str(status)).inc()
        self._seconds.labels(client=client).observe(seconds)

    def text(self) -> bytes:
        for name, value in self._pool.stats().items():
            self._counts.labels(name=name.removeprefix("sandbox/")).set(value)
        return generate_latest(self._registry)
