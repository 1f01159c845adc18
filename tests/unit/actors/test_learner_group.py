"""What version the learners hold, and what becomes of them when one fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from actors.handles import LearnerHandle
from actors.learner_group import LearnerGroup
from rayapp.config.config import Config
from rayapp.core.errors import CheckpointError


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
    group = LearnerGroup((cast("LearnerHandle", rank),), Config())
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
