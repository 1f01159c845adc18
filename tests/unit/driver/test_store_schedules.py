"""Random schedules of a whole asynchronous run, with losses, in any order: invariants that hold in all of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.core.types import GroupSummary
from rayapp.driver.store import TrajectoryStore
from support import make

NUM_STEPS = 6


def summary(group_id: int, version: int) -> GroupSummary:
    return make.summary([0.0, 0.0], group_id=group_id, min_policy_version=version)


class Run:
    """The driver's loop with a scripted engine: `luck` decides how long everything takes, and which groups are lost."""

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        seed: int,
        *,
        straggler_window: int = 0,
        first_step: int = 1,
        kept: TrajectoryStore[int] | None = None,
        drops: bool = False,
    ) -> None:
        self.luck = random.Random(seed)
        self.first_step = first_step
        version = first_step - 1
        most = max_staleness * groups_per_step
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.store: TrajectoryStore[int] = TrajectoryStore(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            max_in_flight=groups_per_step + random.Random(seed).randint(min(1, most), most),
            version=version,
            num_groups=(NUM_STEPS - version) * groups_per_step,
            straggler_window=straggler_window,
            next_group_id=kept.next_untrained_id if kept else 0,
            waiting=kept.waiting if kept else (),
            done_ahead=kept.done_ahead if kept else (),
            refuses=lambda summary, place: drops and summary.group_id % 5 == 2,
        )
        self.server_version = version
        self.trained: list[int] = []
        self.staleness: Counter[int] = Counter()

    async def pause(self) -> None:
        for _ in range(self.luck.randrange(8)):
            await asyncio.sleep(0)
        assert self.store.ledger().balances()

    async def feed(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                ids, version = await self.store.reserve()
                # Nothing is admitted for weights that the servers no longer hold.
                assert version == self.server_version
                for group_id in ids:
                    tasks.create_task(self.generate(group_id, version))

    async def generate(self, group_id: int, version: int) -> None:
        await self.pause()
        while self.luck.random() < 0.2:  # lost with its worker, and issued again
            version = self.store.reissue(group_id, "test")
            await self.pause()
        # A server that loaded new weights meanwhile samples with those.
        sampled_by = max(version, self.server_version)
        await self.pause()
        await self.store.finish(summary(group_id, sampled_by), group_id)

    async def train(self, last_step: int = NUM_STEPS) -> None:
        feeder = asyncio.create_task(self.feed())
        for step in range(self.first_step, last_step + 1):
            groups = await self.store.take(self.groups_per_step)  # raises if one is older than the bound
            await self.pause()
            self.staleness.update(self.store.version - group.summary.min_policy_version for group in groups)
            self.trained += [group.ref for group in groups]
            self.server_version = step
            await self.store.release(step)
            await self.pause()
        feeder.cancel()
        await asyncio.wait([feeder])
        assert feeder.cancelled(), feeder.exception()


def test_with_a_bound_of_one_generation_runs_ahead_of_training() -> None:
    run = Run(groups_per_step=2, max_staleness=1, seed=3)

    asyncio.run(asyncio.wait_for(run.train(), 60))

    assert run.staleness[1] > 0  # otherwise the test above would hold for a store that never overlaps anything


@settings(max_examples=100, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    straggler_window=st.integers(0, 9),
    drops=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_stragglers_that_are_overtaken_are_trained_once_and_never_too_stale(
    groups_per_step: int, max_staleness: int, straggler_window: int, seed: int, *, drops: bool
) -> None:
    run = Run(groups_per_step, max_staleness, seed, straggler_window=straggler_window, drops=drops)

    asyncio.run(asyncio.wait_for(run.train(), 60))

    kept = [number for number in range(2 * NUM_STEPS * groups_per_step) if not (drops and number % 5 == 2)]
    assert sorted(run.trained) == kept[: NUM_STEPS * groups_per_step]
    assert max(run.staleness) <= max_staleness
    if max_staleness == 0:
        assert run.trained == sorted(run.trained)
    for position, group_id in enumerate(run.trained):
        # At most so many with higher ids came before it.
        assert sum(other > group_id for other in run.trained[:position]) <= straggler_window


@settings(max_examples=100, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(1, 3),
    straggler_window=st.integers(0, 9),
    stopped_after=st.integers(1, NUM_STEPS - 1),
    seed=st.integers(0, 2**32),
)
def test_a_run_that_goes_on_keeps_what_was_finished_and_trains_every_group_once(
    groups_per_step: int, max_staleness: int, straggler_window: int, stopped_after: int, seed: int
) -> None:
    async def stop_and_go_on() -> tuple[Run, Run, list[int]]:
        before = Run(groups_per_step, max_staleness, seed, straggler_window=straggler_window)
        await before.train(last_step=stopped_after)
        kept = [group.summary.group_id for group in before.store.waiting]
        after = Run(
            groups_per_step,
            max_staleness,
            seed + 1,
            straggler_window=straggler_window,
            first_step=stopped_after + 1,
            kept=before.store,
        )
        await after.train()
        return before, after, kept

    before, after, kept = asyncio.run(asyncio.wait_for(stop_and_go_on(), 60))

    assert sorted(before.trained + after.trained) == list(range(NUM_STEPS * groups_per_step))
    assert set(kept) <= set(after.trained)
    assert max(after.staleness) <= max_staleness
    # Kept groups were not generated again: they came back to the store as they were.
    assert after.store.ledger().issued == len(after.trained)


async def test_groups_dropped_above_a_straggler_are_not_generated_again_by_a_run_that_goes_on() -> None:
    def store(kept: TrajectoryStore[int] | None = None) -> TrajectoryStore[int]:
        return TrajectoryStore(
            groups_per_step=2,
            max_staleness=1,
            version=1 if kept else 0,
            num_groups=6,
            straggler_window=8,
            next_group_id=kept.next_untrained_id if kept else 0,
            waiting=kept.waiting if kept else (),
            done_ahead=kept.done_ahead if kept else (),
            refuses=lambda summary, place: summary.group_id in (1, 5),
        )

    before = store()
    await before.reserve()
    for group_id in (1, 2, 3):  # 0 is the straggler; 1 is dropped
        await before.finish(summary(group_id, 0), group_id)
    assert [group.ref for group in await before.take(2)] == [2, 3]
    await before.release(1)
    ids, _ = await before.reserve()
    assert ids == [4, 5, 6]
    await before.finish(summary(5, 1), 5)  # dropped after the last step

    after = store(before)

    assert (await after.reserve())[0] == [0, 4, 6, 7]


async def test_one_straggler_holds_nothing_up_until_it_would_grow_too_stale() -> None:
    store: TrajectoryStore[int] = TrajectoryStore(
        groups_per_step=2, max_staleness=1, version=0, num_groups=8, straggler_window=8
    )
    ids, _ = await store.reserve()
    assert ids == [0, 1, 2, 3]
    for group_id in (1, 2, 3):
        await store.finish(summary(group_id, 0), group_id)
    assert [group.ref for group in await store.take(2)] == [1, 2]  # past group 0, which is still running
    await store.release(1)
    assert store.next_untrained_id == 0
    assert store.done_ahead == (1, 2)
    ids, _ = await store.reserve()
    for group_id in ids:
        await store.finish(summary(group_id, 1), group_id)
    # Groups 0 and 3 were sampled by version 0: this is the last step that may train on them, so it waits for group 0.
    waiting = asyncio.create_task(store.take(2))
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.finish(summary(0, 0), 0)
    assert [group.ref for group in await waiting] == [0, 3]
