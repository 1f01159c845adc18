"""Scans a staging folder once and sends what is new: files, checkpoints and the final model, manifests last.

`mirror.py` calls it repeatedly, owns the clock and handles failures. Deletes no local file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Awaitable
from pathlib import Path

from rayapp.config.sections import CheckpointSection
from rayapp.core.aio import together
from rayapp.core.errors import (
    CheckpointDamagedError,
    StorageConfigError,
    StorageError,
    StorageTakenError,
    StorageUnreachableError,
)
from rayapp.runs.checkpoints import CheckpointFolder
from rayapp.runs.mirror.layout import (
    CHECKPOINTS,
    EVALUATIONS,
    FINAL,
    METRICS,
    TRAJECTORIES,
    Ledger,
    Stamp,
    folder_stamp,
    is_of_step_after,
    last_step,
    loose_files,
    stamp_of,
    trajectory_step,
)
from rayapp.runs.mirror.restore import prune, send_files
from rayapp.storage.base import Storage
from rayapp.storage.folders import MANIFEST, delete_manifests_first, put_folder

log = logging.getLogger(__name__)
_AT_ONCE = 4
_SNAPSHOTS = ".mirror-snapshots"
_STOPS_THE_ROUND = (StorageUnreachableError, StorageConfigError, StorageTakenError)
"""Errors after which any other upload of the round would fail in the same way."""


class Uploader:
    """The uploads of one staging folder; not safe to use from two tasks at once, except `files` beside `folders`.

    Args:
        storage: the run's folder in object storage, opened.
        final: the folder `final` in it, opened.
        ledger: files already stored; kept up to date here, saved by the caller.
        section: which checkpoints to keep in storage.
    """

    def __init__(self, storage: Storage, final: Storage, ledger: Ledger, section: CheckpointSection) -> None:
        self._storage, self._final_storage, self._ledger, self._section = storage, final, ledger, section
        self._folder = ledger.folder
        self._checkpoints = CheckpointFolder(self._folder / CHECKPOINTS, section)
        self._one_at_a_time = asyncio.Lock()
        self.num_failed, self.uploaded_bytes = 0, 0
        self.last_error = ""
        self.busy: set[Path] = set()
        """Checkpoints being read, which must not be pruned now."""
        self.cut_after: int | None = None
        """Stored data of later steps belongs to an abandoned attempt; set by a resume until it is deleted."""
        self._num_cuts = 0

    def pending(self) -> dict[str, int]:
        """Return the bytes still to be sent, by key; a folder is one key, and so is stored data still to be deleted."""
        files = {key: stamp[0] for key, stamp in self._new_files().items()}
        if self.cut_after is not None:
            files[f"files of steps after {self.cut_after}, to be deleted"] = 0
        for path in self._unsent_checkpoints():
            files[f"{CHECKPOINTS}/{path.name}"] = (folder_stamp(path) or (0, 0))[0]
        final = folder_stamp(self._folder / FINAL)
        return files | ({FINAL: final[0]} if final is not None and self._is_new(FINAL, final) else {})

    async def files(self) -> None:
        """Send every new or changed file; metrics after the trajectories of their steps.

        Raises:
            StorageError: the storage is unusable now; other failures are counted and retried in the next round.
        """
        async with self._one_at_a_time:
            await self._cut()
            new = self._new_files()
            metrics = new.pop(METRICS, None)
            await together(lambda item: self._file(*item), new.items(), at_once=_AT_ONCE)
            if metrics is not None:
                await self._file(METRICS, metrics)

    async def folders(self, *, is_final: bool = False) -> None:
        """Send complete checkpoints, newest first, and the final model. Raises like `files`.

        Args:
            is_final: the run has ended: a checkpoint no longer waits for the metrics of its step.
        """
        async with self._one_at_a_time:
            await self._cut()  # before the checkpoint of a repeated step is sent, not after
        for path in reversed(self._unsent_checkpoints()):
            if path.exists():
                await self._attempt(f"{CHECKPOINTS}/{path.name}", self._checkpoint(path, is_final=is_final))
        final = self._folder / FINAL
        stamp = await asyncio.to_thread(folder_stamp, final)
        if stamp is not None and self._is_new(FINAL, stamp):
            await self._attempt(FINAL, self._final(final, stamp))

    def _new_files(self) -> dict[str, Stamp]:
        found = loose_files(self._folder, self._ledger.files)
        return {key: stamp for key, stamp in found.items() if self._is_new(key, stamp)}

    def _is_new(self, key: str, stamp: Stamp) -> bool:
        return self._ledger.files.get(key) != stamp

    def _unsent_checkpoints(self) -> list[Path]:
        whole = (checkpoint.path for checkpoint in self._checkpoints.whole())
        return [path for path in whole if f"{CHECKPOINTS}/{path.name}/{MANIFEST}" not in self._ledger.files]

    async def _file(self, key: str, stamp: Stamp) -> None:
        await self._attempt(key, self._send(key, stamp))

    async def _attempt(self, key: str, sending: Awaitable[None]) -> None:
        try:
            await sending
        except _STOPS_THE_ROUND:
            raise
        except CheckpointDamagedError as error:
            self._checkpoints.refuse(self._folder / key, str(error))
            log.warning("%s was not uploaded and is refused: %s", key, error)
        except FileNotFoundError:
            return  # pruned or cut since it was listed
        except (StorageError, OSError) as error:
            self.num_failed += 1
            self.last_error = f"{key}: {error}"
            log.info("%s was not uploaded and is tried again: %s", key, error)

    async def _send(self, key: str, stamp: Stamp) -> None:
        path = self._folder / key
        if trajectory_step(key) is None:
            # The file may grow while it is read: send a snapshot, and record the snapshot's stamp.
            copy = self._folder / _SNAPSHOTS / key
            stamp = stamp_of(path)
            await asyncio.to_thread(_copy, path, copy)
            path = copy
        await self._storage.put_file(path, key)
        self._sent(key, stamp)

    def _sent(self, key: str, stamp: Stamp) -> None:
        self._ledger.files[key] = stamp
        self.uploaded_bytes += stamp[0]

    async def _checkpoint(self, path: Path, *, is_final: bool) -> None:
        key, version, num_cuts = f"{CHECKPOINTS}/{path.name}", int(path.name.removeprefix("step=")), self._num_cuts
        self.busy.add(path)
        try:
            manifest = await send_files(self._storage, path, key)
            # A resume needs the metrics up to the checkpoint's step: send them first; until then it doesn't count.
            if not is_final and last_step(self._folder / METRICS) < version:
                return
            await self.files()
            if self._num_cuts != num_cuts:
                return  # the sent files may be deleted by now
            stamp = folder_stamp(path) or (0, 0)
            await self._storage.put_bytes(json.dumps(manifest, indent=1).encode(), f"{key}/{MANIFEST}")
            self._sent(f"{key}/{MANIFEST}", stamp)
        finally:
            self.busy.discard(path)
        for gone in await prune(self._storage, self._section.keep_last, self._section.keep_best):
            log.info("%s/%s was pruned", self._storage.uri, gone)

    async def _final(self, folder: Path, stamp: Stamp) -> None:
        await put_folder(folder, self._final_storage, overwrite=True)
        self._sent(FINAL, stamp)

    async def _cut(self) -> None:
        """Delete stored data of steps that a resumed run repeats: trajectories, and checkpoints that it refused."""
        if self.cut_after is None:
            return
        after = self.cut_after
        infos = [info async for info in self._storage.list(f"{CHECKPOINTS}/")]
        for folder in (TRAJECTORIES, EVALUATIONS):
            infos += [info async for info in self._storage.list(f"{folder}/")]
        keys = [info.key for info in infos if is_of_step_after(info.key, after)]
        await delete_manifests_first(self._storage, keys)
        for key in [key for key in self._ledger.files if is_of_step_after(key, after)]:
            del self._ledger.files[key]
        self._num_cuts += 1
        # Another cut may have been requested meanwhile: clear only this one.
        self.cut_after = None if self.cut_after == after else self.cut_after


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
