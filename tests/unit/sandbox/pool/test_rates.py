"""The rate of requests to a provider, the pauses after failures, and jumping clocks."""

from __future__ import annotations

import random

import pytest

from rayapp.core.http import TokenBucket
from rayapp.sandbox.pool.pool import LeasePool
from rayapp.sandbox.pool.supply import CircuitBreaker
from rayapp.sandbox.pool.waiting import Demand


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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


def test_pauses_between_failures_grow_and_are_never_the_same_for_two_pools() -> None:
    def pauses(seed: int) -> list[float]:
        breaker = CircuitBreaker(failures=100, cooldown_s=60.0, clock=Clock(), rng=random.Random(seed))
        return [breaker.failed() for _ in range(6)]

    # 0.2 s doubled each time, of which half to all is waited.
    for seed in range(20):
        for exponent, pause_s in enumerate(pauses(seed)):
            assert 0.1 * 2**exponent <= pause_s <= 0.2 * 2**exponent
    assert pauses(1) != pauses(2)


def test_each_failed_trial_doubles_the_cool_down_up_to_ten_minutes_and_a_success_resets_it() -> None:
    clock = Clock()
    breaker = CircuitBreaker(failures=1, cooldown_s=30.0, clock=clock, rng=random.Random(0))
    for cooldown_s in (30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0):
        breaker.failed()
        assert cooldown_s <= breaker.reopens_in_s <= cooldown_s * 1.2
        clock.now += cooldown_s * 1.2
        assert breaker.is_on_trial
    breaker.succeeded()
    breaker.failed()
    assert breaker.reopens_in_s <= 30.0 * 1.2


@pytest.mark.parametrize("jump_s", [-3600.0, -1.0])
async def test_a_clock_that_jumps_back_takes_no_lease_from_anybody(jump_s: float) -> None:
    clock = Clock()
    pool = LeasePool(max_leases=1, max_waiting=5, ttl_s=10.0, holder_timeout_s=5.0, clock=clock)
    lease = await pool.acquire("worker", timeout_s=30)
    clock.now += jump_s
    pool.tend()
    assert pool.stats()["sandbox/leased"] == 1
    pool.release(lease.lease_id)
    assert (await pool.acquire("other", timeout_s=30)).holder == "other"


def test_demand_is_the_most_in_use_at_once_and_is_forgotten_after_two_windows() -> None:
    clock = Clock()
    demand = Demand(window_s=100.0, clock=clock)
    for _ in range(3):
        demand.taken()
    assert demand.num_ahead == 0
    demand.returned()
    demand.returned()
    assert demand.num_ahead == 2  # three at once, one still in use
    demand.returned()
    clock.now += 101.0
    assert demand.num_ahead == 3
    clock.now += 101.0
    assert demand.num_ahead == 0
