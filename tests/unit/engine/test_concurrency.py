"""The limit finds the engine's capacity by itself, backs off once per overload, and starves no request."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.engine.admission import ConcurrencyLimit, Gate, limit_of


class Engine:
    """A KV cache of `capacity` sequences at full length. Each request takes `steps` steps and grows evenly."""

    def __init__(self, capacity: int, *, steps: int = 10) -> None:
        self.capacity = capacity
        self.steps = steps
        self.running: list[float] = []
        self.num_preempted = 0
        self.most_running = 0

    def step(self) -> tuple[float, int, int]:
        """Returns the share of the cache in use, sequences thrown out, sequences that ended."""
        self.running = [age + 1 / self.steps for age in self.running]
        self.most_running = max(self.most_running, len(self.running))
        ended = sum(age >= 1.0 for age in self.running)
        self.running = [age for age in self.running if age < 1.0]
        thrown_out = 0
        while sum(self.running) > self.capacity:
            self.running[self.running.index(min(self.running))] = 0.0
            self.running.sort(reverse=True)
            thrown_out += 1
            if sum(self.running) <= self.capacity or thrown_out > len(self.running):
                break
        self.num_preempted += thrown_out
        return min(1.0, sum(self.running) / self.capacity), thrown_out, ended


def drive(limit: ConcurrencyLimit, engine: Engine, num_steps: int) -> list[int]:
    """Offer more work than the engine can take, always. Returns the number of running sequences after each step."""
    found = []
    for _ in range(num_steps):
        while limit.admits(len(engine.running)):
            engine.running.append(0.0)
        kv_used, num_preempted, num_ended = engine.step()
        limit.observe(kv_used=kv_used, num_preempted=num_preempted, in_flight=len(engine.running) + num_ended)
        for _ in range(num_ended):
            limit.ended(is_wanted=True)
        found.append(len(engine.running))
    return found


def test_on_a_gpu_all_sequences_start_at_once_and_preemption_is_left_to_the_engine() -> None:
    limit = limit_of(256, on_gpu=True)
    drive(limit, Engine(capacity=50), 100)
    assert (limit.limit, limit.num_back_offs) == (256, 0)
    assert limit_of(256, on_gpu=False).limit == 16


def test_with_room_the_limit_grows_to_the_ceiling() -> None:
    limit = ConcurrencyLimit(ceiling=64, start=4)
    drive(limit, Engine(capacity=10_000), 100)
    # It doubles for each round of completions: 4, 8, 16, 32, 64 are four rounds of ten steps.
    assert limit.limit == 64
    assert limit.num_back_offs == 0


def test_under_pressure_it_settles_near_the_capacity_and_keeps_the_engine_busy() -> None:
    # These sequences start and end together, so 40 of them fill the cache: the limit swings between 0.7 * 40 and a
    # round's growth past 40.
    limit, engine = ConcurrencyLimit(ceiling=1000, start=4), Engine(capacity=40)
    running = drive(limit, engine, 2000)
    late = running[1000:]
    assert 28 <= sum(late) / len(late) <= 44
    assert limit.limit < 1000
    # Far fewer sequences are thrown out than with no limit at all.
    unlimited = Engine(capacity=40)
    drive(ConcurrencyLimit(ceiling=1000, start=1000), unlimited, 2000)
    assert engine.num_preempted < unlimited.num_preempted / 10


def test_one_overload_is_one_back_off() -> None:
    limit = ConcurrencyLimit(ceiling=100, start=100)
    for _ in range(5):  # five steps of preemptions, and nothing that was admitted before has ended
        limit.observe(kv_used=1.0, num_preempted=3, in_flight=100)
    assert limit.num_back_offs == 1
    assert limit.limit == 70  # 100 * 0.7


def test_a_limit_that_was_never_reached_backs_off_from_what_ran() -> None:
    limit = ConcurrencyLimit(ceiling=100, start=100)
    limit.observe(kv_used=1.0, num_preempted=1, in_flight=10)
    assert limit.limit == 7


def test_nothing_starts_while_the_cache_is_almost_full_unless_nothing_runs() -> None:
    limit = ConcurrencyLimit(ceiling=100, start=100)
    limit.observe(kv_used=0.97, num_preempted=0, in_flight=3)
    assert not limit.admits(3)
    assert limit.admits(0)
    limit.observe(kv_used=0.5, num_preempted=0, in_flight=3)
    assert limit.admits(3)


async def test_the_oldest_group_passes_first() -> None:
    gate, passed = Gate(ConcurrencyLimit(ceiling=1, start=1)), []

    async def one(group: int) -> None:
        async with gate.enter((group,)):
            passed.append(group)
            await asyncio.sleep(0)

    async with gate.enter((0,)):
        waiting = [asyncio.create_task(one(group)) for group in (9, 3, 7)]
        await asyncio.sleep(0)
        assert gate.num_waiting == 3
    await asyncio.gather(*waiting)
    assert passed == [3, 7, 9]


async def test_a_cohort_passes_whole_and_what_follows_shares_its_room() -> None:
    gate = Gate(ConcurrencyLimit(ceiling=8, start=2))
    with gate.passing(), gate.passing(), gate.passing():
        # Three ran at once, so three may: the next waits for one of them.
        late = asyncio.create_task(gate.enter((1,)).__aenter__())
        await asyncio.sleep(0)
        assert gate.num_waiting == 1
    async with asyncio.timeout(60):
        await late
    assert gate.num_waiting == 0


async def test_a_cancelled_request_gives_its_room_and_its_place_back() -> None:
    gate = Gate(ConcurrencyLimit(ceiling=1, start=1))

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
    gate, done, running = Gate(ConcurrencyLimit(ceiling=ceiling, start=8)), [], 0

    async def one(index: int) -> None:
        nonlocal running
        async with gate.enter((index,)):
            running += 1
            assert running <= ceiling
            try:
                for _ in range(3):
                    gate.observe(kv_used=min(1.0, running / capacity), num_preempted=max(0, running - capacity))
                    await asyncio.sleep(0)
            finally:
                running -= 1
                gate.observe(kv_used=min(1.0, running / capacity), num_preempted=0)
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
