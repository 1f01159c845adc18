"""The rate of requests to a provider, and jumping clocks."""

from __future__ import annotations

import pytest

from rayapp.core.http import TokenBucket
from rayapp.sandbox.pool.pool import LeasePool
from support.make import Clock


def test_a_bucket_gives_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(rate_per_s=2.0, burst=3, clock=clock)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s() == 0.5
    clock.now += 0.5
    assert [bucket.take(), bucket.take()] == [True, False]


def test_a_clock_that_jumps_back_takes_no_tokens_and_one_that_jumps_ahead_gives_no_more_than_the_burst() -> None:
    clock = Clock()
    bucket = TokenBucket(rate_per_s=1.0, burst=2, clock=clock)
    clock.now -= 500.0
    assert [bucket.take(), bucket.take(), bucket.take()] == [True, True, False]
    clock.now += 86400.0
    assert [bucket.take(), bucket.take(), bucket.take()] == [True, True, False]


def test_a_shorter_wait_does_not_lift_a_longer_one() -> None:
    clock = Clock()
    bucket = TokenBucket(rate_per_s=100.0, burst=5, clock=clock)
    bucket.block_for(30.0)
    bucket.block_for(1.0)
    assert (bucket.take(), bucket.wait_s()) == (False, 30.0)
    clock.now += 30.0
    assert bucket.take()


@pytest.mark.parametrize("jump_s", [-3600.0, -1.0])
async def test_a_clock_that_jumps_back_takes_no_lease_from_anybody(jump_s: float) -> None:
    clock = Clock()
    pool = LeasePool(max_leases=1, ttl_s=10.0, clock=clock)
    lease = await pool.acquire("worker", timeout_s=30)
    clock.now += jump_s
    pool.tend()
    assert pool.stats()["sandbox/leased"] == 1
    pool.release(lease.lease_id)
    assert (await pool.acquire("other", timeout_s=30)).holder == "other"
