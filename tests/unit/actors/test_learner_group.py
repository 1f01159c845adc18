"""Dealing groups out to learner ranks, and what version they hold."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.handles import LearnerHandle
from actors.learner_group import LearnerGroup, assign_by_tokens
from rayapp.core.errors import CheckpointError


@given(num_tokens=st.lists(st.integers(1, 10_000), max_size=40), num_ranks=st.integers(1, 9))
def test_every_group_goes_to_exactly_one_rank(num_tokens: list[int], num_ranks: int) -> None:
    assignment = assign_by_tokens(num_tokens, num_ranks)
    assert len(assignment) == num_ranks
    assert sorted(position for positions in assignment for position in positions) == list(range(len(num_tokens)))


@given(num_tokens=st.lists(st.integers(1, 10_000), min_size=1, max_size=40), num_ranks=st.integers(1, 9))
def test_no_rank_is_ahead_of_another_by_more_than_one_group(num_tokens: list[int], num_ranks: int) -> None:
    loads = [sum(num_tokens[p] for p in positions) for positions in assign_by_tokens(num_tokens, num_ranks)]
    assert max(loads) - min(loads) <= max(num_tokens)


class Rank:
    """One learner, whose step ends when it may."""

    name = "learner-0"

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.saved: list[int] = []

    async def train_step(self, step: int, *_: Any) -> dict[str, float]:
        await self.may_end.wait()
        return {}

    async def load_checkpoint(self, folder: str) -> int:
        return 6

    async def begin_checkpoint(self, folder: str, version: int) -> None:
        self.saved.append(version)


async def test_a_step_that_was_broken_off_is_not_saved_under_the_number_of_the_step_before() -> None:
    rank = Rank()
    group = LearnerGroup((cast("LearnerHandle", rank),))
    assert await group.load_checkpoint(Path("step=000006")) == 6
    await group.begin_checkpoint(Path("a"), 6)

    step = asyncio.create_task(group.train_step(7, (), []))
    await asyncio.sleep(0)
    step.cancel()  # a second SIGTERM; the learners go on and end the step
    with pytest.raises(asyncio.CancelledError):
        await step
    assert not group.holds(6)
    with pytest.raises(CheckpointError, match="version 6, but the learners hold what a step left half done"):
        await group.begin_checkpoint(Path("b"), 6)

    rank.may_end.set()
    await group.train_step(7, (), [])
    with pytest.raises(CheckpointError, match="version 6, but the learners hold version 7"):
        await group.begin_checkpoint(Path("b"), 6)
    await group.begin_checkpoint(Path("c"), 7)
    assert rank.saved == [6, 7]
