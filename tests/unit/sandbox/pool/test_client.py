"""A worker's client of the pool: leases are returned even if their caller has gone."""

from __future__ import annotations

import asyncio

import pytest

from rayapp.core.errors import DeadlineError, SandboxDeadlineError, SandboxUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Lease
from rayapp.sandbox.pool.client import PoolClient
from rayapp.sandbox.pool.pool import LeasePool
from support.fake_sandboxes import FakeProvider
from support.timing import until

SPEC = SandboxSpec()


class FarPool:
    """A pool in another process: it does not notice a caller that gives up, and answers can be lost."""

    def __init__(self, pool: LeasePool) -> None:
        self.lost_grants = 0
        """Number of next answers to `acquire` that never arrive."""
        self.unanswered_releases = 0
        """Number of next calls of `release` whose answers never arrive."""
        self._pool = pool
        self._calls: set[asyncio.Task[Lease]] = set()

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int) -> Lease:
        call = asyncio.create_task(self._pool.acquire(holder, spec, timeout_s=timeout_s, lease_id=lease_id))
        self._calls.add(call)
        if self.lost_grants:
            self.lost_grants -= 1
            await asyncio.sleep(0)
            raise DeadlineError("sandbox-pool.acquire did not answer")
        return await asyncio.shield(call)

    async def release(self, lease_id: int, is_clean: bool) -> None:
        self._pool.release(lease_id, is_clean=is_clean)
        if self.unanswered_releases:
            self.unanswered_releases -= 1
            raise DeadlineError("sandbox-pool.release did not answer")


def make() -> tuple[LeasePool, FakeProvider, PoolClient, FarPool]:
    pool = LeasePool(max_leases=1, ttl_s=1000)
    provider, far = FakeProvider(name="local"), FarPool(pool)
    client = PoolClient(far, provider, holder="worker", ttl_s=60)
    return pool, provider, client, far


def leased(pool: LeasePool) -> float:
    return pool.stats()["sandbox/leased"]


async def test_a_caller_that_gives_up_while_it_waits_leaves_no_lease_behind() -> None:
    pool, _, client, _ = make()
    first = client.lease(SPEC, timeout_s=5)
    await first.__aenter__()
    second = asyncio.create_task(client.lease(SPEC, timeout_s=5).__aenter__())
    await until(lambda: pool.stats()["sandbox/waiting"] == 1)

    second.cancel()
    await asyncio.wait({second})
    await first.__aexit__(None, None, None)

    # Removed from the queue, or granted and given back: the next caller finds the place free.
    await until(lambda: pool.stats()["sandbox/waiting"] == 0 and leased(pool) == 0)
    async with client.lease(SPEC, timeout_s=5):
        assert leased(pool) == 1
    await client.close()


async def test_a_lease_granted_after_its_caller_was_told_of_a_deadline_is_given_back() -> None:
    pool, _, client, far = make()
    first = client.lease(SPEC, timeout_s=5)
    await first.__aenter__()
    far.lost_grants = 1

    with pytest.raises(DeadlineError):
        await client.lease(SPEC, timeout_s=60).__aenter__()
    await first.__aexit__(None, None, None)

    await until(lambda: pool.stats()["sandbox/waiting"] == 0 and leased(pool) == 0)
    await client.close()


async def test_a_lease_whose_grant_was_lost_on_the_way_is_given_back_at_once() -> None:
    pool, _, client, far = make()
    far.lost_grants = 1

    with pytest.raises(DeadlineError):
        await client.lease(SPEC, timeout_s=60).__aenter__()

    assert pool.stats()["sandbox/granted"] == 1
    await until(lambda: leased(pool) == 0)
    await client.close()


async def test_an_unanswered_return_of_a_lease_costs_no_result() -> None:
    pool, _, client, far = make()

    async with client.lease(SPEC, timeout_s=5) as sandbox:
        result = await sandbox.run_code("pass", timeout_s=5)
        far.unanswered_releases = 1

    assert result.ok
    assert leased(pool) == 0
    await client.close()


async def test_a_lease_given_up_before_the_pool_heard_of_it_is_never_granted() -> None:
    pool = make()[0]
    pool.release(77)
    with pytest.raises(SandboxUnavailableError, match="cancelled"):
        await pool.acquire("worker", SPEC, timeout_s=5, lease_id=77)
    assert leased(pool) == 0


async def test_a_sandbox_that_cannot_be_made_or_ended_gives_its_place_back_and_costs_no_result() -> None:
    pool, provider, client, _ = make()
    provider.fail_next("create", SandboxDeadlineError("no answer"))
    with pytest.raises(SandboxDeadlineError):
        await client.lease(SPEC, timeout_s=5).__aenter__()
    assert leased(pool) == 0

    provider.fail_next("kill", SandboxDeadlineError("no answer"))
    async with client.lease(SPEC, timeout_s=5) as sandbox:
        result = await sandbox.run_code("pass", timeout_s=5)
    assert result.ok
    assert leased(pool) == 0
    await client.close()


async def test_an_error_or_a_cancellation_in_the_block_gives_the_sandbox_back() -> None:
    pool, provider, client, _ = make()
    with pytest.raises(ZeroDivisionError):
        async with client.lease(SPEC, timeout_s=5):
            raise ZeroDivisionError

    async def hold() -> None:
        async with client.lease(SPEC, timeout_s=5):
            await asyncio.Event().wait()

    holding = asyncio.create_task(hold())
    await until(lambda: leased(pool) == 1 and len(provider.living) == 1)
    holding.cancel()
    await asyncio.wait({holding})

    await until(lambda: leased(pool) == 0)
    assert not provider.living
    await client.close()
