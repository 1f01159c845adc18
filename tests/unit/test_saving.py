"""Checkpoints from the driver's side: training goes on meanwhile, and a save that fails is heard of."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from rayapp.config import Config
from rayapp.errors import CheckpointDamagedError, CheckpointError, StorageFullError
from rayapp.run import restore
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


async def test_a_save_that_failed_leaves_no_half_checkpoint_and_says_what_is_safe(folder: RunFolder) -> None:
    learners = Learners()
    learners.may_end.set()
    learners.error = CheckpointError("the disk is full.")
    saver = CheckpointSaver(learners, folder, asynchronous=False)
    async with saving(saver):
        with pytest.raises(CheckpointError, match=r"full\. There is no whole checkpoint yet"):
            await saver.begin(2, next_group_id=4)
        assert list((folder.path / "checkpoints").iterdir()) == []
    saver = CheckpointSaver(learners, folder, asynchronous=False)
    async with saving(saver):
        learners.error = None
        await saver.begin(4, next_group_id=8)
        learners.error = CheckpointError("the disk is full.")
        with pytest.raises(CheckpointError, match=r"full\. The last whole checkpoint, step=000004, is intact"):
            await saver.begin(6, next_group_id=12)
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step=000004"]


async def test_a_commit_that_finds_the_disk_full_leaves_no_half_checkpoint(folder: RunFolder) -> None:
    learners = Learners()
    learners.may_end.set()
    saver = CheckpointSaver(learners, folder, asynchronous=False, files=lambda: {"state.json": "s" * 100})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on file sizes stands in for a disk without room: the same write fails at the same place.
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(StorageFullError, match="no space left to write"):
            await saver.begin(2, next_group_id=4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((folder.path / "checkpoints").iterdir()) == []


class Restored:
    """A cluster whose learners refuse the checkpoints of some steps."""

    def __init__(self, refused: set[int]) -> None:
        self.learners, self._refused = self, refused

    async def load_checkpoint(self, folder: Path) -> int:
        version = int((folder / "weights").read_text())
        if version in self._refused:
            raise CheckpointDamagedError(f"{folder} holds values that are not finite in lm_head")
        return version


@pytest.mark.parametrize(("refused", "expected"), [(set(), 6), ({6}, 4)])
async def test_a_resume_says_from_which_step_it_goes_on_and_which_checkpoint_it_refuses(
    folder: RunFolder, caplog: pytest.LogCaptureFixture, refused: set[int], expected: int
) -> None:
    learners = Learners()
    learners.may_end.set()
    for version in (4, 6):
        await CheckpointSaver(learners, folder, asynchronous=False).begin(version, next_group_id=2 * version)
    notes: list[str] = []
    found = await restore(Restored(refused), folder, note=notes.append)  # type: ignore[arg-type]
    assert found[:2] == (expected, 2 * expected)
    assert notes == [f"resumed from step {expected} ({folder.path}/checkpoints/step={expected:06d})"]
    assert ("step=000006 is refused" in caplog.text) == bool(refused)
    assert ("not finite in lm_head; step=000004 is used instead" in caplog.text) == bool(refused)


async def test_what_is_being_written_when_the_run_fails_never_counts(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError, match="lost"):
        saver = CheckpointSaver(Learners(), folder, asynchronous=True)
        async with saving(saver):
            await saver.begin(2, next_group_id=4)
            raise RuntimeError("lost")
    assert versions(folder) == []
