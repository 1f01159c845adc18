"""Checkpoints of a run from the driver's side: begun after a step, committed while later steps are trained.

The learners copy their state to host memory and write it in threads; one task of the driver's asks them whether they
are done and then commits the folder. At most one checkpoint is being written. Used by the driver only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from rayapp.durable import write_text
from rayapp.errors import CheckpointError, TrainingAbortedError
from rayapp.kept_groups import KeptGroups
from rayapp.run_folder import RunFolder
from rayapp.store import TrajectoryStore

Kept = Callable[[], Awaitable[KeptGroups]]
log = logging.getLogger(__name__)
POLL_S = 0.2
NOTHING_KEPT = KeptGroups()


class SavingLearners(Protocol):
    """The part of the learners that saves."""

    async def begin_checkpoint(self, folder: Path, version: int) -> None: ...

    async def checkpoint_done(self) -> bool:
        """Raises CheckpointError when it can't be written."""
        ...


class CheckpointSaver:
    """See the module. Its owner closes it with `saving`.

    Args:
        files: further state of the driver's, asked for when a save begins: text by name.
    """

    def __init__(
        self,
        learners: SavingLearners,
        folder: RunFolder,
        *,
        asynchronous: bool,
        files: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._learners, self._folder, self._asynchronous = learners, folder, asynchronous
        self._files = files
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
        """Start to save; returns when training may go on.

        Args:
            kept: what a run that goes on from here need not generate again.
        Raises:
            CheckpointError, StorageFullError: this checkpoint, or the one before it, can't be written.
        """
        await self.finish()
        pending = self._folder.begin_checkpoint(version)
        started = time.monotonic()
        async with self._explained():
            with self._folder.explain_full_disk(pending):
                for name, text in self._files().items():
                    write_text(pending / name, text)
            await self._learners.begin_checkpoint(pending / "learner", version)
        self._writing = asyncio.create_task(
            self._write(version, next_group_id, score, started, kept, pending), name=f"checkpoint={version}"
        )
        if not self._asynchronous:
            await self.finish()

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
            await asyncio.to_thread(self._folder.commit_checkpoint, version, next_group_id=next_group_id, score=score)
        self._seconds = time.monotonic() - started

    @asynccontextmanager
    async def _explained(self) -> AsyncIterator[None]:
        """Free the room of a checkpoint that fails, at once: a full disk would stop the next step too."""
        try:
            yield
        except Exception as error:  # not a cancellation: a thread may be committing it at this moment
            await asyncio.to_thread(self._folder.discard_pending_checkpoint)
            if isinstance(error, CheckpointError):
                raise CheckpointError(f"{error} {self._folder.checkpoints.what_is_safe()}") from error
            raise

    async def finish(self) -> None:
        """Wait until nothing is being written. Raises as `begin` does."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def check(self) -> dict[str, float]:
        """After each step: hear of a save that failed. Returns metrics of one that ended since."""
        if self._writing is None or not self._writing.done():
            return {}
        await self.finish()
        return {"timing_s/checkpoint_write": self._seconds}

    async def close(self) -> None:
        """Give up what is being written; its folder never counts. Idempotent."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        writing.cancel()
        await asyncio.wait([writing])
        if not writing.cancelled() and (error := writing.exception()) is not None:
            log.warning("%s was given up: %s", writing.get_name(), error)


@asynccontextmanager
async def saving(saver: CheckpointSaver) -> AsyncIterator[None]:
    """Close the saver behind the block."""
    try:
        yield
    finally:
        await saver.close()


def is_due(step: int, every_steps: int, *, last: int) -> bool:
    """True on every `every_steps`-th step (0: none of them) and on the last."""
    return step == last or (every_steps > 0 and step % every_steps == 0)


async def nothing_kept() -> KeptGroups:
    """For those who have no store to keep anything of."""
    return KeptGroups()


@asynccontextmanager
async def saving_when_stopped(
    saver: CheckpointSaver, folder: RunFolder, store: TrajectoryStore[Any], kept_groups: Kept = nothing_kept
) -> AsyncIterator[None]:
    """A run that is stopped (Ctrl-C, SIGTERM, `ray job stop`) saves the steps since its last checkpoint, then stops."""
    try:
        yield
    except asyncio.CancelledError:
        await saver.finish()
        last = folder.latest_checkpoint()
        if store.version > (last.version if last is not None else 0):
            next_group_id, kept = store.next_untrained_id, await kept_groups()
            await saver.begin(store.version, next_group_id=next_group_id, kept=kept)
            await saver.finish()
        raise
    except TrainingAbortedError:
        await saver.finish()
        raise
