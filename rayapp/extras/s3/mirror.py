"""Mirrors a run on s3://: the run works in a staging folder, whose complete files are sent to object storage.

    driver --writes--> staging folder --a thread, every second--> s3://bucket/prefix/<run.name>/

    config.yaml, rewards.png, trajectories/…, metrics.jsonl      sent when they change; metrics last
    checkpoints/step=000010/, final/                             files first, manifest last

No local file is deleted before all files are stored: if an upload fails at the end, the same command sends the rest.
`.mirror.json` in the staging folder has the number of the lock under which it was last written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rayapp.config.sections import CheckpointSection
from rayapp.core.aio import together
from rayapp.core.errors import (
    RunFolderError,
    StorageConfigError,
    StorageError,
    StorageIncompleteError,
    StorageUnreachableError,
    first_error,
)
from rayapp.core.files import write_text
from rayapp.extras.s3.checkpoints import fetch_newest, prune, send_files, whole_checkpoints
from rayapp.extras.s3.lock import LOCKS, RunLock, acquire
from rayapp.runs.checkpoints import CheckpointFolder
from rayapp.runs.layout import (
    CHECKPOINTS,
    FINAL,
    METRICS,
    PARQUET,
    PROFILES,
    RECORDED,
    TRAJECTORIES,
    step_of,
)  # fmt: skip
from rayapp.runs.tracking.metrics import read_metrics
from rayapp.storage.base import Storage
from rayapp.storage.folders import MANIFEST, delete_manifests_first, put_folder, put_missing
from rayapp.storage.models.adapters import EXPORTED
from rayapp.storage.opening import open_storage
from rayapp.storage.settings import S3Settings

log = logging.getLogger(__name__)
RECORD = ".mirror.json"
_AT_ONCE = 4
_LEFT_THERE = tuple(f"{folder}/" for folder in (CHECKPOINTS, FINAL, LOCKS, TRAJECTORIES))
_LOCAL_ONLY = "run.lock"
Stamp = tuple[int, int]  # Bytes and time of change in ns: a different stamp means different content.


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    look_every_s: float = 1.0
    beat_every_s: float = 10.0
    lease_s: float = 60.0
    settle_s: float = 1.0
    finish_s: float = 60.0  # Retries of failing uploads at the end of a run; uploads that progress may take longer.


class RunMirror:
    """The uploads of a run, in a thread with its own event loop: neither uploads nor outages delay a training step."""

    def __init__(
        self, uri: str, folder: Path, lock: RunLock, section: CheckpointSection, settings: S3Settings | None,
        patience: Patience,
    ) -> None:  # fmt: skip
        self.uri, self._folder, self._lock, self._section = uri, folder, lock, section
        self._settings, self._patience = settings, patience
        self._checkpoints = CheckpointFolder(folder / CHECKPOINTS, section)
        # Key -> stamp of the local file when it was sent. A checkpoint and `final` are one entry.
        self._sent: dict[str, Stamp] = {}
        self._busy: Path | None = None
        self._cut_after: int | None = None
        self._num_failed = 0
        self._trouble = ""
        self._is_stored = False
        self._ended = threading.Event()
        # Use a daemon thread, so that a second Ctrl-C need not wait for an upload.
        self._thread = threading.Thread(target=self._run, name="mirror", daemon=True)
        self._thread.start()

    def metrics(self) -> dict[str, float]:
        """Return `storage/*` metrics. Raises RunFolderError: another run has taken the folder over."""
        if self._lock.lost:
            raise RunFolderError(self._lock.lost)
        pending = self.pending()
        return {
            "storage/pending_files": float(len(pending)),
            "storage/pending_bytes": float(sum(pending.values())),
            "storage/failed": float(self._num_failed),
        }

    def pending(self) -> dict[str, int]:
        """Return key -> bytes that still have to be sent; stored data that must still be deleted is a key, too."""
        left = {} if self._cut_after is None else {f"files of steps after {self._cut_after}, to be deleted": 0}
        return left | {key: stamp[0] for key, stamp in self._new()}

    def truncate_after(self, version: int) -> None:
        """Delete stored data of later steps: a resumed run repeats those steps."""
        self._cut_after = version

    def is_reading(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint is being sent, so that it must not be deleted."""
        return checkpoint == self._busy

    def finish(self) -> str:
        """Upload the rest and release the remote folder; return a message about files that are not stored, if any."""
        self._ended.set()
        while self._thread.is_alive():  # a Ctrl-C must get through
            self._thread.join(0.2)
        if self._is_stored:
            return ""
        left = self.pending()
        names = ", ".join(sorted(left)[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        return (
            f"{len(left)} files or folders ({sum(left.values()) / 1e6:.1f} MB) are not in {self.uri}: {names}. They "
            f"are safe in {self._folder}. Last: {self._lock.lost or self._trouble}. Remove the cause, then start the "
            "same command again: it sends the rest first"
        )

    def _run(self) -> None:
        try:
            asyncio.run(self._work())
        except Exception as error:  # boundary: reported by `finish`
            self._note_failure(str(first_error(error)))

    def _note_failure(self, text: str) -> None:
        self._num_failed += 1
        if not self._trouble:
            log.warning("uploads fail for now and are retried; training continues: %s", text)
        self._trouble = text

    async def _work(self) -> None:
        async with (
            open_storage(self.uri, settings=self._settings) as storage,
            open_storage(f"{self.uri}/{FINAL}", settings=self._settings) as final,
        ):
            beating = asyncio.create_task(self._lock.beat_for_ever(storage, self._patience.beat_every_s), name="beat")
            while not self._ended.is_set() and not self._lock.lost:
                await self._round(storage, final)
                await asyncio.to_thread(self._ended.wait, self._patience.look_every_s)
            since, num_sent = time.monotonic(), -1
            while not self._lock.lost and time.monotonic() - since < self._patience.finish_s and not self._is_stored:
                await self._round(storage, final)
                self._is_stored = not self.pending()
                if len(self._sent) > num_sent:
                    since, num_sent = time.monotonic(), len(self._sent)
                elif not self._is_stored:
                    await asyncio.sleep(self._patience.look_every_s)
            beating.cancel()
            with suppress(StorageError):
                # If this fails, the next run waits until our lease ends, but works.
                await self._lock.beat(storage, released=True)
                self._is_stored = self._is_stored and not self._lock.lost

    async def _round(self, storage: Storage, final: Storage) -> None:
        """Send what is new. Failures are repeated in the next round; an outage is logged once."""
        num_failed = self._num_failed
        try:
            if self._cut_after is not None:
                await self._cut(storage, self._cut_after)
            await self._files(storage)
            for key, stamp in sorted(self._new(), reverse=True):  # `final`, then checkpoints, newest first
                if key == FINAL or key.startswith(CHECKPOINTS):
                    await self._send(key, stamp, storage, final)
        except (StorageError, OSError) as error:
            self._note_failure(str(error))
        if self._trouble and self._num_failed == num_failed:
            log.warning("uploads to %s work again", self.uri)
            self._trouble = ""

    def _new(self) -> Iterator[tuple[str, Stamp]]:
        """Yield the key and stamp of each file or folder that is not stored as it is now, metrics last."""
        # Recorded steps never change, and there may be thousands: don't look at those that are stored.
        keys = [key for key in _loose_files(self._folder) if not (key.endswith(PARQUET) and key in self._sent)]
        keys += [f"{CHECKPOINTS}/{checkpoint.path.name}" for checkpoint in self._checkpoints.whole()]
        if [path.name for path in (self._folder / FINAL).glob("*")] not in ([], [EXPORTED]):  # that alone was fetched
            keys.append(FINAL)
        for key in sorted(keys, key=lambda key: key == METRICS):
            stamp = _stamp(self._folder / key)
            if stamp is not None and self._sent.get(key) != stamp:
                yield key, stamp

    async def _files(self, storage: Storage) -> None:
        new = [(key, stamp) for key, stamp in self._new() if key != FINAL and not key.startswith(f"{CHECKPOINTS}/")]
        for batch in ([one for one in new if one[0] != METRICS], [one for one in new if one[0] == METRICS]):
            await together(lambda one: self._send(*one, storage), batch, at_once=_AT_ONCE)

    async def _send(self, key: str, stamp: Stamp, storage: Storage, final: Storage | None = None) -> None:
        path = self._folder / key
        try:
            if key == FINAL and final is not None:
                await put_folder(path, final, overwrite=True)
            elif key.startswith(f"{CHECKPOINTS}/"):
                if not await self._checkpoint(path, key, storage):
                    return
            elif key.endswith(PARQUET):
                await put_missing(storage, path, key)
            else:
                await storage.put_file(path, key)
            self._sent[key] = stamp
        except (StorageUnreachableError, StorageConfigError):
            raise  # any other upload of the round would fail in the same way
        except FileNotFoundError:
            return  # it was deleted after it was listed
        except (StorageError, OSError) as error:
            self._note_failure(f"{key}: {error}")

    async def _checkpoint(self, path: Path, key: str, storage: Storage) -> bool:
        """Send a checkpoint, unless the metrics of its step, which a resume needs, are not written yet."""
        self._busy = path
        try:
            await send_files(storage, path, key)
            metrics = self._folder / METRICS
            logged = [record["step"] for record in read_metrics(metrics)] or [-1]
            if metrics.exists() and logged[-1] < (step_of(path.name) or 0) and not self._ended.is_set():
                return False
            await self._files(storage)
            if self._cut_after is not None:
                return False  # the files that were sent may be deleted
            await storage.put_file(path / MANIFEST, f"{key}/{MANIFEST}")
        finally:
            self._busy = None
        await prune(storage, self._section.keep_last, self._section.keep_best)
        return True

    async def _cut(self, storage: Storage, after: int) -> None:
        """Delete stored data of steps that a resumed run repeats: trajectories, and checkpoints that it refused."""

        def is_later(key: str) -> bool:
            top, _, rest = key.partition("/")
            step = step_of(rest.split("/")[0]) if top in (CHECKPOINTS, PROFILES, *RECORDED) else None
            return step is not None and step > after

        await delete_manifests_first(storage, [info.key async for info in storage.list() if is_later(info.key)])
        self._sent = {key: stamp for key, stamp in self._sent.items() if not is_later(key)}
        # Another cut may have been requested meanwhile: clear only the finished one.
        self._cut_after = None if self._cut_after == after else self._cut_after


def _stamp(path: Path) -> Stamp | None:
    try:
        stats = [file.stat() for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    except OSError:
        return None
    return (sum(one.st_size for one in stats), max(one.st_mtime_ns for one in stats)) if stats else None


def _loose_files(folder: Path) -> Iterator[str]:
    """Yield the keys of files that are sent one by one. Hidden files are work in progress."""
    for place, folders, names in os.walk(folder):
        skipped = {CHECKPOINTS, FINAL, LOCKS} if Path(place) == folder else set()
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        kept = (name for name in names if not name.startswith(".") and name != _LOCAL_ONLY)
        yield from ((Path(place) / name).relative_to(folder).as_posix() for name in kept)


@contextmanager
def mirroring(
    uri: str,
    folder: Path,
    section: CheckpointSection,
    *,
    must_be_new: bool = False,
    settings: S3Settings | None = None,
    patience: Patience | None = None,
) -> Iterator[RunMirror]:
    """Bring the staging folder up to date, and mirror it while the block runs.

    Args:
        folder: the staging folder; no other process on this machine writes to it.
        section: checkpoints to keep in storage.
        must_be_new: refuse an existing run (run.resume: never).
    Raises:
        RunFolderError: another run is alive in the remote folder.
        StorageError: it is not reachable or usable; nothing was started.
        StorageIncompleteError: the block has ended well, but not all files could be uploaded.
    """
    patience = patience or Patience()
    lock = asyncio.run(_open(uri, folder, settings, patience, must_be_new=must_be_new))
    mirror = RunMirror(uri, folder, lock, section, settings, patience)
    try:
        yield mirror
    except BaseException:
        # Keep the run's own error, and add a note that the upload is incomplete.
        if unfinished := mirror.finish():
            log.warning("%s", unfinished)
        raise
    if unfinished := mirror.finish():
        raise StorageIncompleteError(unfinished)
    shutil.rmtree(folder)


async def _open(
    uri: str, folder: Path, settings: S3Settings | None, patience: Patience, *, must_be_new: bool
) -> RunLock:
    async with open_storage(uri, settings=settings) as storage:
        await storage.check()
        lock = await acquire(storage, lease_s=patience.lease_s, settle_s=patience.settle_s)
        # Renew the lock meanwhile: fetching a checkpoint may take longer than a lease lasts.
        beating = asyncio.create_task(lock.beat_for_ever(storage, patience.beat_every_s), name="beat")
        try:
            await _prepare(storage, folder, lock.number, must_be_new=must_be_new)
        except BaseException:
            with suppress(StorageError):
                await lock.beat(storage, released=True)
            raise
        finally:
            beating.cancel()
    write_text(folder / RECORD, json.dumps({"uri": uri, "generation": lock.number}))
    return lock


async def _prepare(storage: Storage, folder: Path, number: int, *, must_be_new: bool) -> None:
    """Make the staging folder equal to the run in object storage, unless it is newer.

    Raises RunFolderError: `must_be_new` and a run exists, or the local run's remote folder is gone; and StorageError.
    """
    try:
        written_by = int(json.loads((folder / RECORD).read_text())["generation"])
    except (OSError, ValueError, KeyError, TypeError):
        written_by = 0
    if written_by and number == 1:
        raise RunFolderError(
            f"{storage.uri} holds no run, but {folder} holds a run that was uploaded to it. Delete {folder} to start "
            "over, or choose another run.name."
        )
    if written_by and written_by == number - 1:
        return  # no other process has written to the remote folder since: the local files may be newer
    if must_be_new and (await storage.exists(METRICS) or await whole_checkpoints(storage)):
        raise RunFolderError(
            f"{storage.uri} holds a run already, but run.resume is never. Choose another run.name, delete the stored "
            "run, or continue it with run.resume=auto."
        )
    _clear(folder, keeps=written_by > 0)
    keys = [info.key async for info in storage.list() if not info.key.startswith(_LEFT_THERE)]
    if await storage.exists(f"{FINAL}/{MANIFEST}") and await storage.exists(f"{FINAL}/{EXPORTED}"):
        keys.append(f"{FINAL}/{EXPORTED}")  # it tells whether the run has ended
    await together(lambda key: storage.get_file(key, folder / key), keys, at_once=_AT_ONCE)
    await fetch_newest(storage, folder)


def _clear(folder: Path, *, keeps: bool) -> None:
    """Empty the folder: delete an interrupted restore, but rename a run, which may have files that aren't stored."""
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.stale-{n}").exists())
    stale = folder.with_name(f"{folder.name}.stale-{number}")
    stale.mkdir()
    for path in folder.iterdir():
        if path.name != _LOCAL_ONLY:  # this process holds it
            path.rename(stale / path.name)
    if keeps:
        log.warning("another process has written since; this machine's older files were moved to %s", stale)
    else:
        shutil.rmtree(stale)
