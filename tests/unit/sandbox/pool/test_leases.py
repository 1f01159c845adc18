"""Leases: bounded, in turn, with a deadline, and never lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.core.errors import SandboxUnavailableError
from rayapp.sandbox.pool.pool import Lease, LeasePool
from support.make import Clock


def pool(*, max_leases: int = 2, ttl_s: float = 100.0, clock: Clock | None = None) -> LeasePool:
    return LeasePool(max_leases=max_leases, ttl_s=ttl_s, clock=clock or Clock())


async def started(coroutine) -> asyncio.Task[Lease]:  # type: ignore[no-untyped-def]
    task: asyncio.Task[Lease] = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    return task


async def test_callers_past_the_limit_wait_and_are_served_in_the_order_they_came() -> None:
    p = pool(max_leases=1)
    first = await p.acquire("a", timeout_s=30)
    second = await started(p.acquire("b", timeout_s=30))
    third = await started(p.acquire("c", timeout_s=30))
    p.release(first.lease_id)
    assert (await second).holder == "b"
    assert not third.done()
    p.release((await second).lease_id)
    assert (await third).holder == "c"


async def test_nobody_overtakes_the_queue() -> None:
    p = pool(max_leases=1)
    first = await p.acquire("a", timeout_s=30)
    waiting = await started(p.acquire("b", timeout_s=30))
    p.release(first.lease_id)  # b is granted, though its task has not run yet
    late = await started(p.acquire("c", timeout_s=30))
    assert (await waiting).holder == "b"
    assert not late.done()
    late.cancel()


async def test_a_caller_whose_deadline_passes_is_told_how_busy_the_pool_is() -> None:
    p = pool(max_leases=1)
    await p.acquire("a", timeout_s=30)
    with pytest.raises(SandboxUnavailableError, match="1 of 1 are leased"):
        await p.acquire("b", timeout_s=0.01)
    assert p.stats()["sandbox/waiting"] == 0


async def test_a_lease_past_its_time_to_live_goes_to_the_next_caller() -> None:
    clock = Clock(0.0)
    p = pool(max_leases=1, ttl_s=10.0, clock=clock)
    await p.acquire("dead", timeout_s=30)
    waiting = await started(p.acquire("b", timeout_s=30))
    clock.now = 10.0
    assert p.reclaim_expired() == 1
    assert (await waiting).holder == "b"


async def test_a_dead_callers_places_in_the_queue_go_with_its_leases() -> None:
    p = pool(max_leases=2)
    for _ in range(2):
        await p.acquire("dead", timeout_s=30)
    withdrawn = [await started(p.acquire("dead", timeout_s=30)) for _ in range(3)]
    waiting = [await started(p.acquire("alive", timeout_s=30)) for _ in range(2)]
    assert p.reclaim_of("dead") == 2
    assert {(await task).holder for task in waiting} == {"alive"}
    for task in withdrawn:
        with pytest.raises(SandboxUnavailableError, match="dead"):
            await task
    assert p.stats()["sandbox/granted"] == 4  # none of them to the dead again
    assert p.stats()["sandbox/waiting"] == 0


async def test_releasing_twice_frees_one_place() -> None:
    p = pool(max_leases=2)
    first = await p.acquire("a", timeout_s=30)
    await p.acquire("b", timeout_s=30)
    p.release(first.lease_id)
    p.release(first.lease_id)
    assert p.stats()["sandbox/leased"] == 1


async def test_a_lease_of_a_pool_that_died_frees_nothing_in_its_successor() -> None:
    old = await pool().acquire("a", timeout_s=30)
    successor = pool()
    await successor.acquire("b", timeout_s=30)
    successor.release(old.lease_id)
    assert successor.stats()["sandbox/leased"] == 1


async def test_a_caller_cancelled_in_the_moment_of_its_grant_keeps_nothing() -> None:
    p = pool(max_leases=1)
    first = await p.acquire("a", timeout_s=30)
    waiting = await started(p.acquire("b", timeout_s=30))
    p.release(first.lease_id)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert p.stats()["sandbox/leased"] == 0


async def test_a_caller_that_gives_up_in_the_moment_a_place_is_free_does_not_stop_the_others() -> None:
    p = pool(max_leases=1)
    first = await p.acquire("a", timeout_s=30)
    gone = await started(p.acquire("b", timeout_s=30))
    third = await started(p.acquire("c", timeout_s=30))
    gone.cancel()  # its place in the queue is still there when the lease comes back
    p.release(first.lease_id)
    assert (await third).holder == "c"
    assert p.stats()["sandbox/waiting"] == 0


async def test_a_lease_that_is_still_waited_for_can_be_given_up_by_its_id() -> None:
    p = pool(max_leases=1)
    first = await p.acquire("a", timeout_s=30)
    waiting = await started(p.acquire("b", timeout_s=30, lease_id=7))
    p.release(7)
    with pytest.raises(SandboxUnavailableError, match="cancelled"):
        await waiting
    p.release(first.lease_id)
    assert p.stats()["sandbox/leased"] == p.stats()["sandbox/waiting"] == 0


@settings(max_examples=60, deadline=None)
@given(choices=st.lists(st.integers(0, 999), min_size=10, max_size=80), max_leases=st.integers(1, 4))
def test_under_any_order_of_calls_no_lease_is_lost_and_the_bound_holds(choices: list[int], max_leases: int) -> None:
    async def schedule() -> None:
        p = pool(max_leases=max_leases)
        tasks: list[asyncio.Task[Lease]] = []
        for choice in choices:
            granted = [task for task in tasks if task.done()]
            if choice % 3 == 0 or not tasks:
                tasks.append(await started(p.acquire(f"caller-{choice}", timeout_s=60)))
            elif choice % 3 == 1 and granted:
                task = granted[choice % len(granted)]
                tasks.remove(task)
                p.release(task.result().lease_id)
            else:
                task = tasks.pop(choice % len(tasks))
                if task.done():
                    p.release(task.result().lease_id)
                task.cancel()
                await asyncio.wait([task])
            for _ in range(5):  # a grant wakes its caller one turn of the loop later
                await asyncio.sleep(0)
            held = sum(task.done() for task in tasks)
            assert p.stats()["sandbox/leased"] == held == min(max_leases, len(tasks))
        for task in tasks:
            task.cancel()

    asyncio.run(schedule())
