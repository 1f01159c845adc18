"""The gate admits the oldest group first, leaves the cache room, and starves no request."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.engine.admission import Gate


async def _pass(gate: Gate, group: int, passed: list[int]) -> None:
    async with gate.enter((group,)):
        passed.append(group)
        await asyncio.sleep(0.01)


async def test_nothing_starts_while_the_cache_is_almost_full_unless_nothing_runs() -> None:
    gate, started = Gate(100), list[int]()

    gate.observe(0.97)
    tasks = [asyncio.create_task(_pass(gate, group, started)) for group in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert started == [0]
    gate.observe(0.5)
    await asyncio.gather(*tasks)
    assert started == [0, 1, 2]


async def test_the_oldest_group_passes_first() -> None:
    gate, passed = Gate(1), list[int]()

    async with gate.enter((0,)):
        waiting = [asyncio.create_task(_pass(gate, group, passed)) for group in (9, 3, 7)]
        await asyncio.sleep(0)
        assert gate.num_waiting == 3
    await asyncio.gather(*waiting)
    assert passed == [3, 7, 9]


async def test_a_cohort_passes_whole_and_what_follows_waits_for_its_room() -> None:
    gate = Gate(2)
    with gate.passing(), gate.passing(), gate.passing():
        late = asyncio.create_task(gate.enter((1,)).__aenter__())
        await asyncio.sleep(0)
        assert gate.num_waiting == 1
    async with asyncio.timeout(60):
        await late
    assert gate.num_waiting == 0


async def test_a_cancelled_request_gives_its_room_and_its_place_back() -> None:
    gate = Gate(1)

    async def hold(started: asyncio.Event) -> None:
        async with gate.enter((0,)):
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()
    holder = asyncio.create_task(hold(started))
    await started.wait()
    queued = asyncio.create_task(hold(asyncio.Event()))
    await asyncio.sleep(0)
    for task in (queued, holder):
        task.cancel()
    await asyncio.gather(queued, holder, return_exceptions=True)
    async with asyncio.timeout(60), gate.enter((1,)):
        assert gate.num_waiting == 0


@settings(max_examples=60, deadline=None)
@given(
    ceiling=st.integers(1, 20),
    capacity=st.integers(1, 15),
    num_requests=st.integers(1, 60),
    cancelled=st.sets(st.integers(0, 59)),
)
async def test_whatever_the_capacity_every_request_passes(
    ceiling: int, capacity: int, num_requests: int, cancelled: set[int]
) -> None:
    gate, done, running = Gate(ceiling), [], 0

    async def one(index: int) -> None:
        nonlocal running
        async with gate.enter((index,)):
            running += 1
            assert running <= ceiling
            try:
                for _ in range(3):
                    gate.observe(min(1.0, running / capacity))
                    await asyncio.sleep(0)
            finally:
                running -= 1
                gate.observe(min(1.0, running / capacity))
            done.append(index)

    tasks = [asyncio.create_task(one(index)) for index in range(num_requests)]
    await asyncio.sleep(0)
    for index in cancelled & set(range(num_requests)):
        tasks[index].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert set(range(num_requests)) - cancelled <= set(done)
    assert running == 0
    assert gate.num_waiting == 0
