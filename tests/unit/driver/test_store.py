"""The bounded store: which groups it admits, in which order it returns them, and that its ledger always balances."""

from __future__ import annotations

import asyncio

import pytest

from rayapp.core.types import GroupSummary
from rayapp.driver.store import StoredGroup, TrajectoryStore, _oldest_versions
from support import make


def summary(group_id: int, version: int) -> GroupSummary:
    return make.summary([0.0, 0.0], group_id=group_id, min_policy_version=version)


def refused(group_id: int) -> GroupSummary:
    """A group that `store` drops when it is finished."""
    return make.summary([1.0, 1.0], group_id=group_id, min_policy_version=0)


def store(*, groups_per_step: int = 2, max_staleness: int = 0, num_groups: int = 100) -> TrajectoryStore[int]:
    return TrajectoryStore(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        version=0,
        num_groups=num_groups,
        refuses=lambda summary, place: bool(summary.rewards.all()),
    )


async def is_blocked(coroutine) -> bool:  # type: ignore[no-untyped-def]
    task = asyncio.ensure_future(coroutine)
    for _ in range(50):  # turns of the loop, whatever time they take: the store waits for nothing else
        await asyncio.sleep(0)
    return task.cancel()


async def test_a_synchronous_store_admits_one_step_and_then_blocks_until_release() -> None:
    s = store()
    assert await s.reserve() == ([0, 1], 0)
    assert await is_blocked(s.reserve())
    for group_id in (0, 1):
        await s.finish(summary(group_id, 0), group_id)
    await s.take(2)
    assert await is_blocked(s.reserve())
    await s.release(1)
    assert await s.reserve() == ([2, 3], 1)


async def test_fewer_groups_than_staleness_allows_may_be_in_flight_and_unfinished_ones_outlive_a_step() -> None:
    s = TrajectoryStore[int](
        groups_per_step=2, max_staleness=2, max_in_flight=3, version=0, num_groups=100, straggler_window=4
    )
    assert await s.reserve() == ([0, 1, 2], 0)
    for version in (0, 1):
        for group_id in (2 * version + 1, 2 * version + 2):
            await s.finish(summary(group_id, version), group_id)
        assert [group.ref for group in await s.take(2)] == [2 * version + 1, 2 * version + 2]
        await s.release(version + 1)
        assert await s.reserve() == ([2 * version + 3, 2 * version + 4], version + 1)
    # Group 0 is two steps old now, and waited for.
    await s.finish(summary(5, 2), 5)
    await s.finish(summary(6, 2), 6)
    assert await is_blocked(s.take(2))
    await s.finish(summary(0, 0), 0)
    assert [group.ref for group in await s.take(2)] == [0, 5]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
async def test_a_group_that_is_too_old_is_never_trained(max_staleness: int) -> None:
    s = store(groups_per_step=1, max_staleness=max_staleness)
    await s.reserve()
    await s.finish(summary(0, -max_staleness), 0)
    assert [group.ref for group in await s.take(1)] == [0]
    await s.release(1)

    s = store(groups_per_step=1, max_staleness=max_staleness)
    await s.reserve()
    await s.finish(summary(0, -max_staleness - 1), 0)
    with pytest.raises(AssertionError, match="is too old to be trained"):
        await s.take(1)


def test_a_kept_group_counts_as_admitted_no_later_than_the_groups_above_it() -> None:
    """Group 5 was lost and sampled again by newer weights."""
    sampled_by = {3: 1, 5: 4, 7: 2, 8: 6}
    kept = [StoredGroup(summary=summary(group_id, version), ref=0) for group_id, version in sampled_by.items()]

    assert _oldest_versions(kept) == {3: 1, 5: 2, 7: 2, 8: 6}


async def test_a_dropped_group_is_replaced_by_the_next_prompt() -> None:
    s = store(max_staleness=1)
    await s.reserve()
    await s.finish(refused(0), 0)
    assert await s.reserve() == ([4], 0)
    assert s.dropped_for["equal_rewards"] == 1


async def test_a_synchronous_run_replaces_dropped_groups_together_once_all_of_their_cohort_are_done() -> None:
    s = store(groups_per_step=3)
    await s.reserve()
    await s.finish(refused(0), 0)
    assert await is_blocked(s.reserve())
    await s.finish(refused(2), 2)
    assert await is_blocked(s.reserve())
    await s.finish(summary(1, 0), 1)
    assert await s.reserve() == ([3, 4], 0)


async def test_a_run_resumed_after_a_drop_starts_the_dropped_groups_cohort_again() -> None:
    s = store()
    await s.reserve()
    await s.finish(refused(0), 0)
    assert s.next_untrained_id == 0
    await s.finish(summary(1, 0), 1)
    assert (await s.reserve())[0] == [2]
    await s.finish(summary(2, 0), 2)
    await s.take(2)
    await s.release(1)
    assert s.next_untrained_id == 3


async def test_a_refused_group_is_dropped_and_its_place_in_the_step_decides() -> None:
    places: list[int] = []

    def refuses(summary: GroupSummary, place: int) -> bool:
        places.append(place)
        return place < 1

    s: TrajectoryStore[int] = TrajectoryStore(
        groups_per_step=2, max_staleness=0, version=0, num_groups=10, next_group_id=5, refuses=refuses
    )
    await s.reserve()
    for group_id in (6, 5):
        await s.finish(summary(group_id, 0), group_id)
    assert places == [1, 0]
    assert s.dropped_for == {"equal_rewards": 1}
    await s.reserve()
    await s.finish(summary(7, 0), 7)
    assert [group.summary.group_id for group in await s.take(2)] == [6, 7]
    await s.release(1)
    await s.reserve()
    await s.finish(summary(8, 1), 8)
    assert places == [1, 0, 2, 0]  # the next step counts from its own first group
    assert s.ledger().balances()


async def test_no_more_groups_are_admitted_than_the_run_trains_on() -> None:
    s = store(groups_per_step=2, max_staleness=3, num_groups=3)
    assert (await s.reserve())[0] == [0, 1, 2]
    assert await is_blocked(s.reserve())
