"""Begins checkpoints after a step, and commits them while later steps are trained. This is the driver's part of saving.

The learners write in threads; a task of the driver polls them and then commits the folder, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from rayapp.core.aio import end_process_after, finish_then_cancel, let_process_live, when_stopped
from rayapp.core.errors import (
    CheckpointError,
    LearnersLostError,
    RayappError,
    RestartsUsedUpError,
    StalledError,
    TrainingAbortedError,
)
from rayapp.runs.checkpoints import KeptGroups
from rayapp.runs.folder import RunFolder

Begin = Callable[[int], Awaitable[None]]
log = logging.getLogger(__name__)
POLL_S = 0.2
SAVE_S = 900.0  # for saving when a run stops, in case the disk hangs
CLOSE_S = 300.0  # after that, for the actors to end and release their resources
NOTHING_KEPT = KeptGroups()


class SavingLearners(Protocol):
    def holds(self, version: int) -> bool: ...

    async def begin_checkpoint(self, folder: Path, version: int) -> None: ...

    async def checkpoint_done(self) -> bool:
        """Return whether the checkpoint is written. CheckpointError: it can't be."""
        ...


class Versioned(Protocol):
    @property
    def version(self) -> int: ...


class CheckpointSaver:
    """Begins, checks and commits checkpoints. Close it with `saving`."""

    def __init__(self, learners: SavingLearners, folder: RunFolder) -> None:
        self._learners, self._folder = learners, folder
        self._writing: asyncio.Task[None] | None = None
        self._seconds = 0.0

    async def begin(
        self,
        version: int,
        *,
        next_group_id: int,
        score: float | None = None,
        kept: KeptGroups = NOTHING_KEPT,
    ) -> None:
        """Begin a checkpoint. A resumed run need not generate the groups `kept` again."""
        await self.finish()
        pending = self._folder.checkpoints.begin(version)
        started = time.monotonic()
        async with self._explained():
            await self._learners.begin_checkpoint(pending / "learner", version)
        self._writing = asyncio.create_task(
            self._write(version, next_group_id, score, started, kept, pending), name=f"checkpoint={version}"
        )

    async def _write(
        self, version: int, next_group_id: int, score: float | None, started: float, kept: KeptGroups, pending: Path
    ) -> None:
        def write_kept() -> None:
            with self._folder.explain_full_disk(pending):
                kept.write(pending, version)

        async with self._explained():
            await asyncio.to_thread(write_kept)
            while not await self._learners.checkpoint_done():  # noqa: ASYNC110 - an actor can't set an event of ours
                await asyncio.sleep(POLL_S)
            await asyncio.to_thread(self._folder.checkpoints.commit, version, next_group_id=next_group_id, score=score)
        self._seconds = time.monotonic() - started

    def can_save(self, version: int) -> bool:
        """Return whether the learners hold this version; False in the middle of a step."""
        return self._learners.holds(version)

    @asynccontextmanager
    async def _explained(self) -> AsyncIterator[None]:
        """Delete the files of a checkpoint that fails in the block: on a full disk, the next step would fail too."""
        try:
            yield
        except Exception as error:  # not if cancelled: a thread may be committing the checkpoint
            await asyncio.to_thread(self._folder.checkpoints.clear_pending)
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{error} {self._folder.checkpoints.what_is_safe()}") from error
            raise

    async def finish(self) -> None:
        if self._writing is None:
            return
        # If the caller is cancelled, the save continues: `finish` is called again, or `close` abandons it.
        await asyncio.wait([self._writing])
        writing, self._writing = self._writing, None
        await writing

    async def check(self) -> dict[str, float]:
        """Raise the error of a save that failed; return the metrics of one that ended. Called after each step."""
        if self._writing is None or not self._writing.done():
            return {}
        await self.finish()
        return {"timing_s/checkpoint_write": self._seconds}

    async def close(self) -> None:
        """Abandon a checkpoint that is being written; its folder is never used."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        writing.cancel()
        await asyncio.wait([writing])
        if not writing.cancelled() and (error := writing.exception()) is not None:
            log.warning("the save of %s was abandoned: %s", writing.get_name(), error)


@asynccontextmanager
async def saving(saver: CheckpointSaver) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await saver.close()


def is_due(step: int, every_steps: int, *, last: int) -> bool:
    """Return True on every `every_steps`-th step (0: none of them) and on the last."""
    return step == last or (every_steps > 0 and step % every_steps == 0)


@contextmanager
def saying_what_is_saved(folder: RunFolder, note: Callable[[str], None]) -> Iterator[None]:
    """Print a note if a user stops the run in the block; at its end, print the saved steps and how to continue."""
    when_stopped(
        lambda: note("stopping: a step that has begun is finished and saved first; press Ctrl-C again to stop at once")
    )
    try:
        yield
    except (asyncio.CancelledError, KeyboardInterrupt):
        last = folder.checkpoints.latest()
        saved = f"stopped after step {last.version}, which is saved" if last else "stopped before anything was saved"
        onwards = "continues from there" if last else "starts over"
        note(f"{saved}; the same command {onwards}. Look at it with: rayapp view {folder.uri}")
        raise


@asynccontextmanager
async def saving_when_stopped(
    saver: CheckpointSaver, folder: RunFolder, store: Versioned, begin: Begin
) -> AsyncIterator[None]:
    """Save the steps since the last checkpoint when the run is stopped in the block (by a user, a spent budget, a
    stall, or a process that was lost too often); not in mid-step. After a TrainingAbortedError only the save in
    progress is finished.

    CheckpointError: a user stopped the run, and it can't be saved; in other cases this is only logged.
    """
    save = partial(_save_at_the_end, saver, folder, store, begin)
    try:
        yield
    except asyncio.CancelledError:
        await save()
        raise
    except (StalledError, RestartsUsedUpError, TrainingAbortedError) as reason:
        try:
            # Shield the save: several tasks may detect that a process was lost too often, and each of them cancels the
            # run.
            await finish_then_cancel(_finish(saver) if isinstance(reason, TrainingAbortedError) else save())
        except RayappError as error:
            log.warning("%s", error)
        if isinstance(reason, StalledError):
            end_process_after(CLOSE_S)  # a thread that hangs on the disk would prevent the interpreter from exiting
        raise


async def _save_at_the_end(saver: CheckpointSaver, folder: RunFolder, store: Versioned, begin: Begin) -> None:
    async with _in_time():
        await saver.finish()
        last = folder.checkpoints.latest()
        if store.version <= (last.version if last is not None else 0):
            return
        if not saver.can_save(store.version):
            log.warning(
                "stopped in the middle of step %d: the run continues from its last checkpoint", store.version + 1
            )
            return
        await begin(store.version)
        await saver.finish()


async def _finish(saver: CheckpointSaver) -> None:
    async with _in_time():
        await saver.finish()


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Limit the block to SAVE_S seconds. If the process hangs on a disk after that, it is ended by force."""
    end_process_after(SAVE_S + CLOSE_S)
    limit = asyncio.timeout(SAVE_S)
    try:
        async with limit:
            yield
    except LearnersLostError as error:
        # Raise another type, because after a LearnersLostError the run would start new learners and continue.
        raise CheckpointError(f"the steps since the last checkpoint are not saved: {error}") from error
    except TimeoutError:
        if not limit.expired():
            raise
        raise CheckpointError(
            f"the steps since the last checkpoint are not saved: they were not written within {SAVE_S:g} s. Check the "
            "disk of the run folder, then start the run again: it continues from its last checkpoint."
        ) from None
    finally:
        if not limit.expired():
            let_process_live()
