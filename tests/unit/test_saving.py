"""Checkpoints from the driver's side: training goes on meanwhile, and a save that fails is heard of."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rayapp.config import Config
from rayapp.errors import CheckpointError
from rayapp.run_folder import RunFolder
from rayapp.saving import CheckpointSaver, saving


class Learners:
    """Writes when it is let, or fails."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.error: CheckpointError | None = None

    async def begin_checkpoint(self, folder: Path, version: int) -> None:
        folder.mkdir()
        (folder / "weights").write_text(str(version))

    async def checkpoint_done(self) -> bool:
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, Config())


def versions(folder: RunFolder) -> list[int]:
    return [checkpoint.version for checkpoint in folder.checkpoints.whole()]


async def test_a_step_can_be_taken_while_a_checkpoint_is_written(folder: RunFolder) -> None:
    learners = Learners()
    saver = CheckpointSaver(learners, folder, asynchronous=True)
    async with saving(saver):
        await saver.begin(2, next_group_id=4, score=0.5)
        assert await saver.check() == {}
        assert versions(folder) == []
        learners.may_end.set()
        await saver.finish()
        assert versions(folder) == [2]
        assert folder.checkpoints.whole()[0].score == 0.5


async def test_the_next_save_waits_for_the_one_before(folder: RunFolder) -> None:
    learners = Learners()
    saver = CheckpointSaver(learners, folder, asynchronous=True)
    async with saving(saver):
        await saver.begin(2, next_group_id=4)
        second = asyncio.create_task(saver.begin(3, next_group_id=6))
        await asyncio.sleep(0)
        assert not second.done()
        learners.may_end.set()
        await second
        assert versions(folder) == [2]
        await saver.finish()
        assert versions(folder) == [2, 3]


async def test_without_asynchronous_it_is_written_when_begin_returns(folder: RunFolder) -> None:
    learners = Learners()
    learners.may_end.set()
    saver = CheckpointSaver(learners, folder, asynchronous=False)
    async with saving(saver):
        await saver.begin(2, next_group_id=4)
        assert versions(folder) == [2]


async def test_a_save_that_failed_ends_the_run_after_the_next_step_with_the_one_before_whole(folder: RunFolder) -> None:
    learners = Learners()
    learners.may_end.set()
    saver = CheckpointSaver(learners, folder, asynchronous=True)
    with pytest.raises(CheckpointError, match="disk is full"):
        async with saving(saver):
            await saver.begin(2, next_group_id=4)
            await saver.finish()
            learners.error = CheckpointError("the disk is full")
            await saver.begin(3, next_group_id=6)
            while True:
                await saver.check()
                await asyncio.sleep(0)
    assert versions(folder) == [2]


async def test_what_is_being_written_when_the_run_fails_never_counts(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError, match="lost"):
        saver = CheckpointSaver(Learners(), folder, asynchronous=True)
        async with saving(saver):
            await saver.begin(2, next_group_id=4)
            raise RuntimeError("lost")
    assert versions(folder) == []
