"""Brings a run back from object storage to an empty staging folder: its newest whole checkpoint and its small files.

Trajectories, older checkpoints and the final model stay where they are: nothing goes on from them. Called before a run
starts; nothing else writes to the folder then.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from rayapp.core.aio import together
from rayapp.core.errors import RunFolderError, StorageCorruptError
from rayapp.runs.mirror.layout import CHECKPOINTS, EXPORTED, FINAL, LOCKS, METRICS, TRAJECTORIES, folder_stamp
from rayapp.runs.mirror.ledger import Ledger, stamp_of
from rayapp.runs.mirror.remote_checkpoints import fetch, whole_checkpoints
from rayapp.storage.base import Storage
from rayapp.storage.folders import MANIFEST

log = logging.getLogger(__name__)
RESTORING = ".restoring"
_AT_ONCE = 4
_LEFT_THERE = tuple(f"{folder}/" for folder in (CHECKPOINTS, FINAL, LOCKS, TRAJECTORIES))


async def prepare(storage: Storage, folder: Path, generation: int, *, must_be_new: bool) -> Ledger:
    """Make the staging folder what the run in object storage is, and tell what of it is uploaded.

    Args:
        generation: of our lock; the first is 1.
        must_be_new: refuse a run that is there (run.resume: never).
    Raises:
        RunFolderError: `must_be_new` and it is not; or there is a run here whose remote folder is gone.
        StorageError: it can't be read whole.
    """
    if (folder / RESTORING).exists():
        _empty(folder)  # all of it came from there
    ledger = Ledger.load(folder)
    if ledger is not None and ledger.generation == generation - 1 > 0:
        # Nobody has written there since we did: what is here is all of it, and may be newer.
        ledger.generation = generation
        ledger.save()
        return ledger
    if ledger is not None and generation == 1:
        raise RunFolderError(
            f"{storage.uri} holds no run, but {folder} holds one that was written there. Delete {folder} to start "
            "anew, or choose another run.name."
        )
    if must_be_new and (await storage.exists(METRICS) or await whole_checkpoints(storage)):
        raise RunFolderError(
            f"{storage.uri} holds a run already, and run.resume is never. Choose another run.name, delete it there, or "
            "go on with run.resume=auto."
        )
    if ledger is not None or _has_files(folder):
        _set_aside(folder)
    ledger = Ledger(folder=folder, uri=storage.uri, generation=generation)
    await _restore(storage, ledger)
    ledger.save()
    (folder / RESTORING).unlink()
    return ledger


async def _restore(storage: Storage, ledger: Ledger) -> None:
    folder = ledger.folder
    (folder / RESTORING).touch()
    keys = [info.key async for info in storage.list() if not info.key.startswith(_LEFT_THERE)]

    async def get(key: str) -> None:
        await storage.get_file(key, folder / key)
        ledger.files[key] = stamp_of(folder / key)

    await together(get, keys, at_once=_AT_ONCE)
    await _newest(storage, ledger)
    await _marker_of_final(storage, folder, ledger)


async def _marker_of_final(storage: Storage, folder: Path, ledger: Ledger) -> None:
    """Fetch the one file of the final model that says which step it is of: it tells whether the run has ended."""
    key = f"{FINAL}/{EXPORTED}"
    if await storage.exists(f"{FINAL}/{MANIFEST}") and await storage.exists(key):
        await storage.get_file(key, folder / key)
        stamp = folder_stamp(folder / FINAL)
        assert stamp is not None, f"{folder / key} was just read"
        ledger.files[FINAL] = stamp


async def _newest(storage: Storage, ledger: Ledger) -> None:
    """The newest checkpoint whose files are what was written; damaged ones are passed over, aloud."""
    found = await whole_checkpoints(storage)
    damaged: StorageCorruptError | None = None
    for checkpoint in reversed(found):
        try:
            path = await fetch(storage, checkpoint, ledger.folder)
        except StorageCorruptError as error:
            log.warning("%s/%s is damaged and passed over: %s", storage.uri, checkpoint.key, error)
            damaged = error
            continue
        ledger.files[f"{checkpoint.key}/{MANIFEST}"] = stamp_of(path / MANIFEST)
        return
    if damaged is not None:
        raise damaged


def _has_files(folder: Path) -> bool:
    return any(path.name != "run.lock" for path in folder.iterdir())


def _set_aside(folder: Path) -> None:
    """Keep what is here under another name: another machine went on with the run, and this may not be uploaded."""
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.stale-{n}").exists())
    stale = folder.with_name(f"{folder.name}.stale-{number}")
    stale.mkdir()
    for path in folder.iterdir():
        if path.name != "run.lock":  # held by us
            path.rename(stale / path.name)
    log.warning("%s was written by another process since; what this machine had of it is now in %s", folder, stale)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "run.lock":
            path.unlink()
