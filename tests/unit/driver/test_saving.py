"""Checkpoints on the driver's side: training continues meanwhile, and a failed save is reported."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.core.aio import let_process_live
from rayapp.core.errors import (
    CheckpointDamagedError,
    CheckpointError,
    LearnersLostError,
    RayappError,
    RestartsUsedUpError,
    StalledError,
    StorageFullError,
)
from rayapp.driver import saving as saving_module
from rayapp.driver.run import restore
from rayapp.driver.saving import CheckpointSaver, saving, saving_when_stopped
from rayapp.driver.store import TrajectoryStore
from rayapp.runs.folder import RunFolder


class Learners:
    """Writes when the test allows it, or fails."""

    def __init__(self, *, holds: int | None = None, may_end: bool = False) -> None:
        self.may_end = asyncio.Event()
        if may_end:
            self.may_end.set()
        self.error: RayappError | None = None
        self.version = holds
        """None: in the middle of a step."""

    def holds(self, version: int) -> bool:
        return self.version == version

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


@pytest.fixture(autouse=True)
def alive() -> Iterator[None]:
    """Keep this process alive: a run that stalled would end its process soon after."""
    yield
    let_process_live()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def versions(folder: RunFolder) -> list[int]:
    return [checkpoint.version for checkpoint in folder.checkpoints.whole()]


async def test_a_step_can_be_taken_while_a_checkpoint_is_written(folder: RunFolder) -> None:
    learners = Learners()
    saver = CheckpointSaver(learners, folder)
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
    saver = CheckpointSaver(learners, folder)
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


async def test_a_save_that_failed_leaves_no_half_checkpoint_and_says_what_is_safe(folder: RunFolder) -> None:
    learners = Learners(may_end=True)
    learners.error = CheckpointError("the disk is full.")
    saver = CheckpointSaver(learners, folder)
    async with saving(saver):
        with pytest.raises(CheckpointError, match=r"full\. There is no complete checkpoint yet"):
            await saver.begin(2, next_group_id=4)
            await saver.finish()
        assert list((folder.path / "checkpoints").iterdir()) == []
    saver = CheckpointSaver(learners, folder)
    async with saving(saver):
        learners.error = None
        await saver.begin(4, next_group_id=8)
        await saver.finish()
        learners.error = CheckpointError("the disk is full.")
        await saver.begin(6, next_group_id=12)
        with pytest.raises(CheckpointError, match=r"full\. .* from the last complete checkpoint, step=000004"):
            while True:  # after each of the next steps
                await saver.check()
                await asyncio.sleep(0)
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step=000004"]


async def test_a_commit_that_finds_the_disk_full_leaves_no_half_checkpoint(folder: RunFolder) -> None:
    learners = Learners(may_end=True)
    saver = CheckpointSaver(learners, folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on file sizes stands in for a disk without room: the same write fails at the same place.
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(StorageFullError, match="no space left to write"):
            await saver.begin(2, next_group_id=4)
            await saver.finish()
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
    learners = Learners(may_end=True)
    for version in (4, 6):
        saver = CheckpointSaver(learners, folder)
        await saver.begin(version, next_group_id=2 * version)
        await saver.finish()
    notes: list[str] = []
    found = await restore(Restored(refused), folder, note=notes.append)  # type: ignore[arg-type]
    assert found[:2] == (expected, 2 * expected)
    assert notes == [f"resumed from step {expected} ({folder.path}/checkpoints/step={expected:06d})"]
    assert ("step=000006 is refused" in caplog.text) == bool(refused)
    assert ("not finite in lm_head; step=000004 is used instead" in caplog.text) == bool(refused)


async def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_begins_anew(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    notes: list[str] = []
    for _ in range(2):  # the second has nothing to cut
        assert (await restore(Restored(set()), folder, note=notes.append))[0] == 0  # type: ignore[arg-type]
    assert notes == ["there is no checkpoint yet: the run starts over, and its 2 recorded steps are deleted"]


async def test_what_is_being_written_when_the_run_fails_never_counts(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError, match="lost"):
        saver = CheckpointSaver(Learners(), folder)
        async with saving(saver):
            await saver.begin(2, next_group_id=4)
            raise RuntimeError("lost")
    assert versions(folder) == []


async def run_until(ends: Callable[[CheckpointSaver], Awaitable[None]], learners: Learners, folder: RunFolder) -> None:
    """A run that has trained three steps and then awaits `ends`."""
    store: TrajectoryStore[object] = TrajectoryStore(groups_per_step=2, max_staleness=0, version=3, num_groups=10)
    saver = CheckpointSaver(learners, folder)

    async def begin(version: int) -> None:
        await saver.begin(version, next_group_id=store.next_untrained_id)

    async with saving(saver), saving_when_stopped(saver, folder, store, begin):
        await ends(saver)


def raising(error: Exception) -> Callable[[CheckpointSaver], Awaitable[None]]:
    async def fail(saver: CheckpointSaver) -> None:
        raise error

    return fail


async def until_stopped(saver: CheckpointSaver) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("error", [RestartsUsedUpError("lost 4 times"), StalledError("nothing was finished")])
async def test_a_run_that_lost_a_process_too_often_or_stalled_saves_what_it_has_trained(
    error: RayappError, folder: RunFolder
) -> None:
    learners = Learners(holds=3)
    run = asyncio.create_task(run_until(raising(error), learners, folder))
    await turns()
    run.cancel()  # the supervisor finds the same process lost, and stops the run too
    await turns()
    learners.may_end.set()

    with pytest.raises((type(error), asyncio.CancelledError)):
        await run
    assert versions(folder) == [3]


async def test_a_stalled_run_whose_disk_hangs_gives_the_save_up_in_time_and_says_what_stalled(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving_module, "SAVE_S", 0.05)
    learners = Learners(holds=3)

    with pytest.raises(StalledError, match="nothing was finished"):
        await asyncio.wait_for(run_until(raising(StalledError("nothing was finished")), learners, folder), 60)

    assert versions(folder) == []
    assert "Check the disk of the run folder" in caplog.text


@pytest.mark.parametrize("is_in_a_step", [True, False])
async def test_a_run_that_is_stopped_saves_what_it_has_trained_and_within_a_step_nothing_under_a_wrong_name(
    folder: RunFolder, caplog: pytest.LogCaptureFixture, *, is_in_a_step: bool
) -> None:
    learners = Learners() if is_in_a_step else Learners(holds=3, may_end=True)
    run = asyncio.create_task(run_until(until_stopped, learners, folder))
    await turns()
    run.cancel()

    with pytest.raises(asyncio.CancelledError):
        await run
    assert versions(folder) == ([] if is_in_a_step else [3])
    assert ("stopped in the middle of step 4" in caplog.text) == is_in_a_step


async def test_a_run_that_is_stopped_while_it_waits_for_a_save_has_that_checkpoint(folder: RunFolder) -> None:
    learners = Learners()

    async def wait_for_it(saver: CheckpointSaver) -> None:
        await saver.begin(3, next_group_id=6)
        await saver.finish()

    run = asyncio.create_task(run_until(wait_for_it, learners, folder))
    await turns()
    run.cancel()
    await turns()
    learners.may_end.set()

    with pytest.raises(asyncio.CancelledError):
        await run
    assert versions(folder) == [3]


async def test_a_run_that_is_stopped_and_loses_its_learners_in_the_save_does_not_start_new_ones(
    folder: RunFolder,
) -> None:
    learners = Learners(holds=3, may_end=True)
    learners.error = LearnersLostError("learner-1 is gone")
    run = asyncio.create_task(run_until(until_stopped, learners, folder))
    await turns()
    run.cancel()

    with pytest.raises(CheckpointError, match="not saved: learner-1 is gone"):
        await run
