"""The version that the learners hold, and what happens when one fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from actors import progress
from actors.handles import LearnerHandle
from actors.learner_group import LearnerGroup
from rayapp.config.config import Config
from rayapp.core.errors import CheckpointError, LearnersLostError, RayappError, WeightSyncError
from rayapp.core.types import Picture
from support import make


class Rank:
    """One learner, whose step ends when the test allows it."""

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


class Sender:
    """One learner whose sync fails."""

    name = "learner-0"

    def __init__(self, error: RayappError) -> None:
        self._error = error

    async def send_weights(self, version: int, timeout_s: float) -> dict[str, float]:
        raise self._error


async def test_a_step_shows_how_far_it_is_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(["", "1 of 3 micro-batches of a pass done", *["2 of 3 micro-batches of a pass done"] * 10**6])
    monkeypatch.setattr(progress, "told", lambda: next(told))
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    shown, rank = list[str](), Rank()
    group = LearnerGroup((cast("LearnerHandle", rank),), Config(), on_progress=shown.append)

    training = asyncio.create_task(group.train_step(1, (), []))
    while len(shown) < 3:
        await asyncio.sleep(0.01)
    rank.may_end.set()
    await training
    num_shown = len(shown)
    await asyncio.sleep(0.05)

    assert [text[:6] for text in shown[:3]] == ["1 of 3", "2 of 3", "2 of 3"]
    assert len(shown) == num_shown


async def test_a_learner_that_breaks_off_in_the_middle_of_a_sync_is_lost_and_one_whose_server_fails_is_not() -> None:
    def group(error: RayappError) -> LearnerGroup:
        return LearnerGroup((cast("LearnerHandle", Sender(error)),), Config())

    with pytest.raises(WeightSyncError, match=r"vllm-server-1: its process is gone"):
        await group(WeightSyncError("vllm-server-1: its process is gone")).send_weights(1, 1.0)
    # The other ranks wait for it in the middle of a gather.
    with pytest.raises(LearnersLostError, match=r"failed while it exported its weights\. .*CUDA out of memory"):
        await group(RayappError("learner-0.send_weights failed: CUDA out of memory")).send_weights(1, 1.0)


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
    with pytest.raises(CheckpointError, match="version 6, but the learners hold a half-finished step"):
        await group.begin_checkpoint(Path("b"), 6)

    rank.may_end.set()
    await group.train_step(7, (), [])
    with pytest.raises(CheckpointError, match="version 6, but the learners hold version 7"):
        await group.begin_checkpoint(Path("b"), 6)
    await group.begin_checkpoint(Path("c"), 7)
    assert rank.saved == [6, 7]


async def test_whoever_needs_the_learners_gpus_waits_for_the_end_of_a_step_however_it_ends() -> None:
    rank = Rank()
    group = LearnerGroup((cast("LearnerHandle", rank),), Config())
    await group.rest()
    for is_cancelled in (False, True):
        rank.may_end.clear()
        step = asyncio.create_task(group.train_step(1, (), []))
        waiting = asyncio.create_task(group.rest())
        await asyncio.wait([waiting], timeout=0)
        assert not waiting.done()
        if is_cancelled:
            step.cancel()
        rank.may_end.set()
        await asyncio.wait([step])
        async with asyncio.timeout(60):
            await waiting


async def test_ranks_that_share_micro_batches_get_the_same_trajectories() -> None:
    class Learning(Rank):
        async def supervised_step(self, step: int, rows: Any, pictures: Any) -> dict[str, float]:
            self.rows = [row.num_tokens for row in rows]
            assert len(pictures) == sum(len(row.media) for row in rows)
            return {}

    ranks = [Learning() for _ in range(4)]
    config = Config.model_validate({"learner": {"num_learners": 4, "sequence_parallel": 2}})
    group = LearnerGroup(tuple(cast("LearnerHandle", rank) for rank in ranks), config)
    rows = [make.trajectory([1] * size, 1) for size in (5, 9, 4, 2)]
    rows[0] = replace(rows[0], media=(Picture(sha256="a", start=1, end=3),))
    await group.supervised_step(1, rows, {"a": b"", "of another step": b""})
    assert [rank.rows for rank in ranks] == [[9, 2], [9, 2], [5, 4], [5, 4]]
