"""Mirrors a run on s3://: the run works in a staging folder, whose complete files are sent to object storage.

    driver --writes--> staging folder --Uploader, every second--> s3://bucket/prefix/<run.name>/

Uses one thread with its own event loop, so that neither uploads nor outages delay a training step. `RunFolder.open`
opens the mirror before anything starts and closes it after the run; an incomplete upload is then an error that says how
to finish. The run's files stay on this machine until all of them are stored.

`Uploader` scans the staging folder once and sends what is new: files, checkpoints and the final model, manifests last.
It deletes no local file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rayapp.config.config import Config
from rayapp.config.sections import CheckpointSection
from rayapp.core.aio import together
from rayapp.core.errors import (
    CheckpointDamagedError,
    RunFolderError,
    StorageConfigError,
    StorageError,
    StorageIncompleteError,
    StorageTakenError,
    StorageUnreachableError,
    first_error,
)
from rayapp.core.files import Location
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
from rayapp.runs.mirror.lock import BEAT_EVERY_S, LEASE_S, SETTLE_S, RunLock, acquire, last_generation
from rayapp.runs.mirror.restore import fetch_again, prepare, prune, send_files
from rayapp.storage.base import Storage
from rayapp.storage.folders import MANIFEST, delete_manifests_first, put_folder
from rayapp.storage.opening import open_storage
from rayapp.storage.settings import S3Settings

log = logging.getLogger(__name__)
_AT_ONCE = 4
_SNAPSHOTS = ".mirror-snapshots"
_STOPS_THE_ROUND = (StorageUnreachableError, StorageConfigError, StorageTakenError)
"""Errors after which any other upload of the round would fail in the same way."""


class Uploader:
    """The uploads of one staging folder; not safe for concurrent tasks, except that `files` and `folders` may run at
    the same time.

    Args:
        storage: the run's folder in object storage, opened.
        final: the folder `final` in it, opened.
        ledger: files already stored; kept up to date here, saved by the caller.
        section: settings for the checkpoints to keep in storage.
    """

    def __init__(self, storage: Storage, final: Storage, ledger: Ledger, section: CheckpointSection) -> None:
        self._storage, self._final_storage, self._ledger, self._section = storage, final, ledger, section
        self._folder = ledger.folder
        self._checkpoints = CheckpointFolder(self._folder / CHECKPOINTS, section)
        self._one_at_a_time = asyncio.Lock()
        self.num_failed, self.uploaded_bytes = 0, 0
        self.last_error = ""
        self.busy: set[Path] = set()
        """Checkpoints that are being uploaded, so they must not be deleted now."""
        self.cut_after: int | None = None
        """Step after which stored data must be deleted, because a resumed run repeats those steps; None when it is
        deleted.
        """
        self._num_cuts = 0

    def pending(self) -> dict[str, int]:
        """Return the bytes that still have to be sent, by key. A folder is one key. Stored data that must still be
        deleted is another key.
        """
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
            await self._cut()  # delete first, then send the checkpoint of a repeated step
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
            return  # the checkpoint was deleted after it was listed
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
                return  # the files that were sent may have been deleted meanwhile
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
        # Another cut may have been requested meanwhile: clear only the finished one.
        self.cut_after = None if self.cut_after == after else self.cut_after


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


Send = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Intervals and time limits of a mirror."""

    look_every_s: float = 1.0
    """Seconds between two scans of the staging folder."""
    beat_every_s: float = BEAT_EVERY_S
    lease_s: float = LEASE_S
    settle_s: float = SETTLE_S
    finish_s: float = 60.0
    """Seconds for which failing uploads are retried at the end of a run. Uploads that progress may take longer."""


class RunMirror:
    """The uploads of a running run. Make one with `mirroring`."""

    def __init__(
        self, ledger: Ledger, lock: RunLock, section: CheckpointSection, settings: S3Settings | None, patience: Patience
    ) -> None:
        self.uri = ledger.uri
        self._ledger, self._lock, self._section = ledger, lock, section
        self._settings, self._patience = settings, patience
        self._uploader: Uploader | None = None
        self._ended = threading.Event()
        self._is_ready = threading.Event()
        self._stuck_at: int | None = None
        """Bytes uploaded when the storage became unusable; None while it is usable."""
        self._num_outages = 0
        self._crash: BaseException | None = None
        self._left: dict[str, int] = {}
        self._fetched: set[int] = set()
        # Use a daemon thread, so that a second Ctrl-C need not wait for an upload.
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    def metrics(self) -> dict[str, float]:
        """Return `storage/*` metrics.

        Raises:
            RunFolderError: another run has taken the folder over.
        """
        if self._lock.lost:
            raise RunFolderError(self._lock.lost)
        uploader = self._uploader
        if uploader is None:
            return {"storage/failed": 1.0}
        pending = uploader.pending()
        return {
            "storage/pending_files": float(len(pending)),
            "storage/pending_bytes": float(sum(pending.values())),
            "storage/uploaded_bytes": float(uploader.uploaded_bytes),
            "storage/failed": float(uploader.num_failed + self._num_outages),
        }

    def truncate_after(self, version: int) -> None:
        """Delete stored trajectories of later steps: a resumed run repeats those steps."""
        if self._uploader is not None:
            self._uploader.cut_after = version

    def fetch_again(self, newest: int) -> bool:
        """Fetch the newest checkpoint up to version `newest` that this method has not fetched yet; False if none is
        left.

        Blocks. Raises StorageError.
        """

        async def fetching() -> bool:
            async with open_storage(self.uri, settings=self._settings) as storage:
                return await fetch_again(storage, self._ledger.folder, newest, self._fetched)

        return asyncio.run(fetching())

    def is_reading(self, checkpoint: Path) -> bool:
        """Return True while a checkpoint is being sent."""
        return self._uploader is not None and checkpoint in self._uploader.busy

    def finish(self) -> dict[str, int]:
        """Upload the remaining files and release the remote folder. Idempotent.

        Returns:
            Bytes that are not stored, by key; empty if complete.
        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C instead of waiting.
        """
        self._ended.set()
        while self._thread.is_alive():
            self._thread.join(0.2)
        # If the state is unknown, never report that everything is stored: the staging folder would be deleted.
        if self._crash is not None or self._lock.lost:
            return self._left or {"(not known)": 0}
        return self._left

    @property
    def trouble(self) -> str:
        """Return the last error as text for messages."""
        if self._lock.lost:
            return self._lock.lost
        if self._crash is not None:
            return f"{type(self._crash).__name__}: {self._crash}"
        return self._uploader.last_error if self._uploader is not None else ""

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception as error:  # boundary: reported by `metrics` and `finish`
            self._crash = first_error(error)
            log.warning("uploads to %s have stopped: %s", self.uri, self._crash)
        finally:
            self._is_ready.set()

    async def _work(self) -> None:
        async with (
            open_storage(self.uri, settings=self._settings) as storage,
            open_storage(f"{self.uri}/final", settings=self._settings) as final,
        ):
            fence = partial(self._lock.fence, storage)
            uploader = Uploader(storage.fenced(fence), final.fenced(fence), self._ledger, self._section)
            self._uploader = uploader
            self._is_ready.set()
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._lock.beat_for_ever(storage, self._patience.beat_every_s), name="beat")
                await asyncio.gather(self._until_ended(uploader.files), self._until_ended(uploader.folders))
                await self._send_rest(uploader)
                beating.cancel()
            self._left = uploader.pending()
            self._ledger.save()
            with suppress(StorageError):
                # If this fails, the next run waits until our lease ends, but works.
                await self._lock.release(storage)

    async def _until_ended(self, send: Send) -> None:
        while not self._ended.is_set() and not self._lock.lost:
            await self._attempt(send)
            await asyncio.to_thread(self._ended.wait, self._patience.look_every_s)

    async def _attempt(self, send: Send) -> None:
        """Run one round of uploads. Each failure of the storage is counted; its outage and return are logged once."""
        uploader = self._uploader
        assert uploader is not None
        try:
            await send()
            self._ledger.save()
        except StorageTakenError:
            return  # `metrics` raises this error, which ends the run
        except (StorageError, OSError) as error:
            self._num_outages += 1
            uploader.last_error = str(error)
            if self._stuck_at is None:
                self._stuck_at = uploader.uploaded_bytes
                log.warning("uploads fail for now and are retried; training continues: %s", error)
        # An outage is over only after bytes were uploaded.
        if self._stuck_at is not None and uploader.uploaded_bytes > self._stuck_at:
            self._stuck_at = None
            log.warning("uploads to %s work again", self.uri)

    async def _send_rest(self, uploader: Uploader) -> None:
        async def everything() -> None:
            await uploader.files()
            await uploader.folders(is_final=True)
            await uploader.files()

        since, before = time.monotonic(), uploader.uploaded_bytes
        while not self._lock.lost:
            await self._attempt(everything)
            if not uploader.pending():
                return
            if uploader.uploaded_bytes > before:
                since, before = time.monotonic(), uploader.uploaded_bytes
            if time.monotonic() - since > self._patience.finish_s:
                return
            await asyncio.sleep(self._patience.look_every_s)


@contextmanager
def mirroring(
    config: Config,
    folder: Path,
    *,
    only_send: bool = False,
    settings: S3Settings | None = None,
    patience: Patience | None = None,
) -> Iterator[RunMirror | None]:
    """Bring the staging folder up to date, and mirror it while the block runs; None for a run on a local disk.

    Args:
        folder: `config.run_folder`; no other process on this machine writes to it.
        only_send: refuse to change the staging folder: it must hold the newest data.
    Raises:
        RunFolderError: another run is alive in the remote folder.
        StorageError: it is not reachable or usable; nothing was started.
        StorageIncompleteError: the block has ended well, but not all files could be uploaded.
    """
    if not Location.parse(config.run.output_dir).is_remote:
        yield None
        return
    patience = patience or Patience()
    lock, ledger = asyncio.run(_open(config, folder, settings, patience, only_send=only_send))
    mirror = RunMirror(ledger, lock, config.checkpoint, settings, patience)
    try:
        yield mirror
    except BaseException:
        # Keep the run's own error, and add a note that the upload is incomplete.
        if left := mirror.finish():
            log.warning("%s", _unfinished(mirror, folder, left))
        raise
    if left := mirror.finish():
        raise StorageIncompleteError(_unfinished(mirror, folder, left))
    shutil.rmtree(folder)


async def _open(
    config: Config, folder: Path, settings: S3Settings | None, patience: Patience, *, only_send: bool
) -> tuple[RunLock, Ledger]:
    must_be_new = config.run.resume == "never" and not only_send
    async with open_storage(config.run_uri, settings=settings) as storage:
        await storage.check()
        if only_send:
            await _check_last_writer(storage, folder)
        lock = await acquire(
            storage, lease_s=patience.lease_s, poll_s=min(2.0, patience.lease_s / 4), settle_s=patience.settle_s
        )
        # Renew the lock meanwhile: fetching a checkpoint may take longer than a lease lasts.
        beating = asyncio.create_task(lock.beat_for_ever(storage, patience.beat_every_s), name="beat")
        try:
            ledger = await prepare(storage, folder, lock.generation, must_be_new=must_be_new)
        except BaseException:
            with suppress(StorageError):
                await lock.release(storage)
            raise
        finally:
            beating.cancel()
    if lock.lost:
        raise RunFolderError(lock.lost)
    return lock, ledger


async def _check_last_writer(storage: Storage, folder: Path) -> None:
    ledger = Ledger.load(folder)
    if ledger is None:
        raise RunFolderError(
            f"{folder} has no record of an earlier upload to {storage.uri}, so uploading it could replace newer files. "
            f"Nothing was changed on either side. Continue the run from {storage.uri} instead."
        )
    if ledger.generation != await last_generation(storage):
        raise RunFolderError(
            f"{folder} is out of date: another process has written to {storage.uri} since the last upload from this "
            "folder, and uploading it would replace newer files. Nothing was changed on either side. Continue the "
            f"run from {storage.uri} instead."
        )


def _unfinished(mirror: RunMirror, folder: Path, left: dict[str, int]) -> str:
    names = ", ".join(sorted(left)[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
    why = f" Last: {mirror.trouble}." if mirror.trouble else ""
    return (
        f"{len(left)} files or folders ({sum(left.values()) / 1e6:.1f} MB) are not in {mirror.uri}: {names}. They are "
        f"safe in {folder}.{why} Remove the cause, then finish with: rayapp sync {folder}"
    )
