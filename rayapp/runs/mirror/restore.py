"""Restores a run from object storage to a staging folder, and sends, fetches and prunes its checkpoints there.

A restore fetches the newest complete checkpoint and the small files. Trajectories, older checkpoints and the final
model stay in object storage: no run needs them to resume. `prepare` runs before the run starts, while nothing else
writes to the folder; `fetch_again` runs when a local checkpoint is refused.

Checkpoints have the same folders as on disk. Their manifest is sent last, and names each file's size and SHA-256.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.core.aio import together
from rayapp.core.errors import CheckpointDamagedError, RunFolderError, StorageCorruptError, StorageNotFoundError
from rayapp.core.files import put_in_place, remove_tree, write_text
from rayapp.runs.checkpoints import Checkpoint, parse_manifest, to_keep
from rayapp.runs.mirror.layout import (
    CHECKPOINTS,
    EXPORTED,
    FINAL,
    LOCKS,
    METRICS,
    TRAJECTORIES,
    Ledger,
    checkpoint_step,
    folder_stamp,
    stamp_of,
)
from rayapp.storage.base import SHA256, XXH3, ObjectInfo, Storage, both_digests
from rayapp.storage.folders import MANIFEST, delete_manifests_first, put_missing

_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A complete checkpoint in object storage; `described.path` is the key of its folder."""

    described: Checkpoint
    manifest: dict[str, Any]

    @property
    def key(self) -> str:
        return self.described.path.as_posix()


async def whole_checkpoints(storage: Storage) -> list[RemoteCheckpoint]:
    """Return checkpoints with a manifest whose files are all there with their sizes, oldest first."""
    sizes = {info.key: info.num_bytes async for info in storage.list(f"{CHECKPOINTS}/")}
    found = []
    for key in sorted(sizes):
        folder, _, name = key.rpartition("/")
        if name != MANIFEST or checkpoint_step(key) is None:
            continue
        read = await _read(storage, folder)
        if read and all(sizes.get(f"{folder}/{file}") == size for file, size in read.manifest["files"].items()):
            found.append(read)
    return sorted(found, key=lambda checkpoint: checkpoint.described.version)


async def _read(storage: Storage, folder: str) -> RemoteCheckpoint | None:
    try:
        manifest = json.loads(await storage.get_bytes(f"{folder}/{MANIFEST}"))
        return RemoteCheckpoint(described=parse_manifest(Path(folder), manifest), manifest=manifest)
    except (ValueError, KeyError, TypeError, AttributeError, StorageCorruptError, StorageNotFoundError):
        return None


async def send_files(storage: Storage, folder: Path, key: str) -> dict[str, Any]:
    """Send the files of the checkpoint at `folder`, each compared with its manifest, but not the manifest itself.

    Returns:
        The manifest, to be sent when all other files are stored.
    Raises:
        CheckpointDamagedError: a file differs from its checksum.
        StorageError; OSError: the checkpoint was pruned meanwhile.
    """
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    sha256: dict[str, str] = {}

    async def send(name: str) -> None:
        xxh3, found = await asyncio.to_thread(both_digests, folder / name)
        info = ObjectInfo(key=f"{key}/{name}", num_bytes=manifest["files"][name], sha256=found)
        if xxh3 != manifest[XXH3].get(name) or await put_missing(storage, folder / name, info) != info:
            raise CheckpointDamagedError(f"the checksum of {name} is wrong")
        sha256[name] = found

    await together(send, manifest["files"], at_once=_AT_ONCE)
    return manifest | {SHA256: sha256}


async def fetch(storage: Storage, checkpoint: RemoteCheckpoint, run: Path) -> Path:
    """Read a checkpoint into the run folder `run`, every file verified; it appears when complete.

    Raises:
        StorageCorruptError: a file differs from its checksum.
        StorageError: the checkpoint can't be read.
    """
    target = run / checkpoint.key
    pending = target.with_name(f".pending-{target.name}")
    sums = checkpoint.manifest.get(SHA256, {})

    async def get(name: str) -> None:
        await storage.get_file(f"{checkpoint.key}/{name}", pending / name, sha256=sums.get(name, ""))

    await asyncio.to_thread(remove_tree, pending)
    await together(get, checkpoint.manifest["files"], at_once=_AT_ONCE)
    await asyncio.to_thread(write_text, pending / MANIFEST, json.dumps(checkpoint.manifest, indent=1))
    await asyncio.to_thread(put_in_place, pending, target)
    return target


async def prune(storage: Storage, keep_last: int, keep_best: int) -> Sequence[str]:
    """Delete checkpoints that are neither among the newest nor among the best, and incomplete ones older than the
    newest complete one. If the newest checkpoint is not stored as it was sent, it counts as incomplete, so that it
    never replaces a good one.

    Returns:
        The keys of the deleted folders.
    """
    found = await whole_checkpoints(storage)
    while found and not await _is_as_sent(storage, found[-1]):
        found.pop()
    if not found:
        return ()
    whole = [checkpoint.described for checkpoint in found]
    kept = tuple(f"{checkpoint.path.as_posix()}/" for checkpoint in to_keep(whole, keep_last, keep_best))
    keys = [info.key async for info in storage.list(f"{CHECKPOINTS}/") if not info.key.startswith(kept)]
    gone = [key for key in keys if (step := checkpoint_step(key)) is not None and step < whole[-1].version]
    await delete_manifests_first(storage, gone)
    return sorted({"/".join(key.split("/")[:2]) for key in gone})


async def _is_as_sent(storage: Storage, checkpoint: RemoteCheckpoint) -> bool:
    """Compare the storage's own checksums of the objects with the manifest's; no object is read."""
    for name, sha256 in checkpoint.manifest.get(SHA256, {}).items():
        info = await storage.info(f"{checkpoint.key}/{name}")
        if info is None or info.sha256 not in ("", sha256):
            return False
    return True


log = logging.getLogger(__name__)
RESTORING = ".restoring"
_LEFT_THERE = tuple(f"{folder}/" for folder in (CHECKPOINTS, FINAL, LOCKS, TRAJECTORIES))


async def prepare(storage: Storage, folder: Path, generation: int, *, must_be_new: bool) -> Ledger:
    """Make the staging folder equal to the run in object storage. Returns the record of files already uploaded.

    Args:
        generation: number of our lock; the first is 1.
        must_be_new: refuse an existing run (run.resume: never).
    Raises:
        RunFolderError: `must_be_new` and a run exists; or the local run's remote folder is gone.
        StorageError: the run can't be read completely.
    """
    if (folder / RESTORING).exists():
        _empty(folder)  # all files in the folder came from object storage
    ledger = Ledger.load(folder)
    if ledger is not None and ledger.generation == generation - 1 > 0:
        # No other process has written to the remote folder since: the local files are complete, and may be newer.
        ledger.generation = generation
        ledger.save()
        return ledger
    if ledger is not None and generation == 1:
        raise RunFolderError(
            f"{storage.uri} holds no run, but {folder} holds a run that was uploaded to it. Delete {folder} to start "
            "over, or choose another run.name."
        )
    if must_be_new and (await storage.exists(METRICS) or await whole_checkpoints(storage)):
        raise RunFolderError(
            f"{storage.uri} holds a run already, but run.resume is never. Choose another run.name, delete the stored "
            "run, or continue it with run.resume=auto."
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
    """Fetch the file that names the final model's step: it tells whether the run has ended."""
    key = f"{FINAL}/{EXPORTED}"
    if await storage.exists(f"{FINAL}/{MANIFEST}") and await storage.exists(key):
        await storage.get_file(key, folder / key)
        stamp = folder_stamp(folder / FINAL)
        assert stamp is not None, f"{folder / key} was fetched just before"
        ledger.files[FINAL] = stamp


async def _newest(storage: Storage, ledger: Ledger) -> None:
    """Fetch the newest checkpoint with intact files; skip damaged ones with a warning."""
    found = await whole_checkpoints(storage)
    damaged: StorageCorruptError | None = None
    for checkpoint in reversed(found):
        try:
            path = await fetch(storage, checkpoint, ledger.folder)
        except StorageCorruptError as error:
            _tell_damaged(storage, checkpoint, error)
            damaged = error
            continue
        ledger.files[f"{checkpoint.key}/{MANIFEST}"] = stamp_of(path / MANIFEST)
        return
    if damaged is not None:
        raise damaged


async def fetch_again(storage: Storage, folder: Path, newest: int, tried: set[int]) -> bool:
    """Fetch a checkpoint to replace refused ones in `folder`; False if no other is left.

    Args:
        newest: the highest version to take.
        tried: versions that earlier calls fetched; extended by this call.
    """
    for checkpoint in reversed(await whole_checkpoints(storage)):
        version = checkpoint.described.version
        if version > newest or version in tried:
            continue
        tried.add(version)
        try:
            await fetch(storage, checkpoint, folder)
        except StorageCorruptError as error:
            _tell_damaged(storage, checkpoint, error)
            continue
        log.warning("%s/%s was fetched: no checkpoint in %s can be used", storage.uri, checkpoint.key, folder)
        return True
    return False


def _tell_damaged(storage: Storage, checkpoint: RemoteCheckpoint, error: StorageCorruptError) -> None:
    log.warning("%s/%s is damaged and skipped: %s", storage.uri, checkpoint.key, error)


def _has_files(folder: Path) -> bool:
    return any(path.name != "run.lock" for path in folder.iterdir())


def _set_aside(folder: Path) -> None:
    """Move the local files to another name: another machine has continued the run, and these files may not have been
    uploaded.
    """
    number = next(n for n in range(1, 10**6) if not folder.with_name(f"{folder.name}.stale-{n}").exists())
    stale = folder.with_name(f"{folder.name}.stale-{number}")
    stale.mkdir()
    for path in folder.iterdir():
        if path.name != "run.lock":  # this process holds it
            path.rename(stale / path.name)
    log.warning("another process has written to %s since; this machine's older files were moved to %s", folder, stale)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "run.lock":
            path.unlink()
