"""Random schedules of a whole asynchronous run, losses included, in any order: what must hold in all of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.store import TrajectoryStore
from rayapp.types import GroupSummary

NUM_STEPS = 6


def summary(group_id: int, version: int) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        task="t",
        rewards=np.zeros(2, np.float32),
        valid=np.ones(2, np.bool_),
        num_tokens=np.ones(2, np.int32),
        num_response_tokens=np.ones(2, np.int32),
        num_prompt_tokens=1,
        statuses=("completed", "completed"),
        reward_statuses=("scored", "scored"),
        failure_kinds=("", ""),
        reward_terms={},
        min_policy_version=version,
        max_policy_version=version,
        time_generate_s=0.0,
        time_score_s=0.0,
        time_total_s=0.0,
    )


class Run:
    """The driver's loop with a scripted engine: `luck` decides how long everything takes, and what is lost."""

    def __init__(self, groups_per_step: int, max_staleness: int, seed: int) -> None:
        self.luck = random.Random(seed)
        self.groups_per_step, self.max_staleness = groups_per_step, max_staleness
        self.store: TrajectoryStore[int] = TrajectoryStore(
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            version=0,
            num_groups=NUM_STEPS * groups_per_step,
        )
        self.server_version = 0
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
        # A server that took new weights meanwhile samples with those.
        sampled_by = max(version, self.server_version)
        await self.pause()
        await self.store.finish(summary(group_id, sampled_by), group_id)

    async def train(self) -> None:
        feeder = asyncio.create_task(self.feed())
        for step in range(1, NUM_STEPS + 1):
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


@settings(max_examples=60, deadline=None)
@given(groups_per_step=st.integers(1, 4), max_staleness=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_no_group_is_lost_trained_twice_or_older_than_the_bound(
    groups_per_step: int, max_staleness: int, seed: int
) -> None:
    run = Run(groups_per_step, max_staleness, seed)

    asyncio.run(asyncio.wait_for(run.train(), 20.0))

    assert run.trained == list(range(NUM_STEPS * groups_per_step))
    assert max(run.staleness) <= max_staleness
    assert run.store.ledger().trained == run.store.ledger().issued == len(run.trained)


def test_with_a_bound_of_one_generation_runs_ahead_of_training() -> None:
    run = Run(groups_per_step=2, max_staleness=1, seed=3)

    asyncio.run(asyncio.wait_for(run.train(), 20.0))

    assert run.staleness[1] > 0  # else the test above would hold for a store that never overlaps anything
