"""A worker's client of the pool: what it was lent comes back, also when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rayapp.errors import SandboxDeadlineError
from rayapp.sandbox.client import PoolClient
from rayapp.sandbox.fake import FakeProvider
from rayapp.sandbox.leases import Fate, Lease
from rayapp.sandbox.pool import LeasePool
from rayapp.types import SandboxSpec

SPEC = SandboxSpec()


class FarPool:
    """A pool in another process: a caller that gives up is not heard of there."""

    def __init__(self, pool: LeasePool) -> None:
        self._pool = pool
        self._calls: set[asyncio.Task[Lease]] = set()

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float) -> Lease:
        call = asyncio.create_task(self._pool.acquire(holder, spec, timeout_s=timeout_s))
        self._calls.add(call)
        return await asyncio.shield(call)

    async def release(self, lease_id: int, fate: Fate) -> None:
        self._pool.release(lease_id, fate)

    async def heartbeat(self, holder: str) -> None:
        self._pool.heartbeat(holder)


def make() -> tuple[LeasePool, FakeProvider, PoolClient]:
    pool = LeasePool(max_leases=1, max_waiting=10, ttl_s=1000)
    provider = FakeProvider(name="local")
    return pool, provider, PoolClient(FarPool(pool), provider, holder="worker", ttl_s=60)


def leased(pool: LeasePool) -> float:
    return pool.stats()["sandbox/leased"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0)


async def test_a_caller_that_gives_up_while_it_waits_leaves_no_lease_behind() -> None:
    pool, _, client = make()
    first = client.lease(SPEC, timeout_s=5)
    await first.__aenter__()
    second = asyncio.create_task(client.lease(SPEC, timeout_s=5).__aenter__())
    await until(lambda: pool.stats()["sandbox/waiting"] == 1)

    second.cancel()
    await asyncio.wait({second})
    await first.__aexit__()

    # Granted to the caller that is gone, and given back for it.
    await until(lambda: pool.stats()["sandbox/granted"] == 2 and leased(pool) == 0)
    await client.close()


async def test_a_sandbox_that_cannot_be_ended_does_not_cost_its_result() -> None:
    pool, provider, client = make()
    provider.fail_next("kill", SandboxDeadlineError("no answer"))

    async with client.lease(SPEC, timeout_s=5) as sandbox:
        result = await sandbox.run_code("pass", timeout_s=5)

    assert result.ok
    assert leased(pool) == 0
    await client.close()


async def test_a_sandbox_that_cannot_be_made_gives_its_place_back() -> None:
    pool, provider, client = make()
    provider.fail_next("create", SandboxDeadlineError("no answer"))

    with pytest.raises(SandboxDeadlineError):
        await client.lease(SPEC, timeout_s=5).__aenter__()

    assert leased(pool) == 0
    await client.close()
