"""A run's checkpoints in object storage, with the same files as on disk: sent manifest last, fetched, and pruned."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from rayapp.core.aio import together
from rayapp.core.errors import StorageCorruptError, StorageNotFoundError
from rayapp.core.files import put_in_place, remove_tree
from rayapp.runs.checkpoints import Checkpoint, damage, parse_manifest, to_keep
from rayapp.runs.layout import CHECKPOINTS, step_of
from rayapp.storage.base import Storage
from rayapp.storage.folders import MANIFEST, delete_manifests_first, put_missing

log = logging.getLogger(__name__)
_AT_ONCE = 4


async def whole_checkpoints(storage: Storage) -> list[Checkpoint]:
    """Return checkpoints whose files are all there with their sizes, oldest first; `path` is their folder's key."""
    sizes = {info.key: info.num_bytes async for info in storage.list(f"{CHECKPOINTS}/")}
    found = []
    for key in sizes:
        folder = Path(key).parent
        if Path(key).name != MANIFEST or step_of(folder.name) is None:
            continue
        try:
            manifest = json.loads(await storage.get_bytes(key))
            if all(sizes.get(f"{folder}/{name}") == size for name, size in manifest["files"].items()):
                found.append(parse_manifest(folder, manifest))
        except (ValueError, KeyError, TypeError, AttributeError, StorageCorruptError, StorageNotFoundError):
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.version)


async def send_files(storage: Storage, folder: Path, key: str) -> None:
    """Send a checkpoint's files that are not stored, but not its manifest."""
    names = json.loads((folder / MANIFEST).read_text())["files"]
    await together(lambda name: put_missing(storage, folder / name, f"{key}/{name}"), names, at_once=_AT_ONCE)


async def fetch_newest(storage: Storage, run: Path) -> None:
    """Read the newest intact checkpoint into the run folder `run`, where it appears when complete.

    Raises StorageCorruptError: all checkpoints are damaged.
    """
    damaged: StorageCorruptError | None = None
    for checkpoint in reversed(await whole_checkpoints(storage)):
        try:
            await _fetch(storage, checkpoint.path.as_posix(), run / checkpoint.path)
            return
        except StorageCorruptError as error:
            log.warning("%s/%s is damaged and skipped: %s", storage.uri, checkpoint.path, error)
            damaged = error
    if damaged is not None:
        raise damaged


async def _fetch(storage: Storage, key: str, target: Path) -> None:
    pending = target.with_name(f".pending-{target.name}")
    names = [*json.loads(await storage.get_bytes(f"{key}/{MANIFEST}"))["files"], MANIFEST]
    await asyncio.to_thread(remove_tree, pending)
    await together(lambda name: storage.get_file(f"{key}/{name}", pending / name), names, at_once=_AT_ONCE)
    if wrong := await asyncio.to_thread(damage, pending):
        raise StorageCorruptError(wrong)
    await asyncio.to_thread(put_in_place, pending, target)


async def prune(storage: Storage, keep_last: int, keep_best: int) -> None:
    """Delete checkpoints that are not to be kept, and incomplete ones older than the newest complete one."""
    whole = await whole_checkpoints(storage)
    kept = {checkpoint.version for checkpoint in to_keep(whole, keep_last, keep_best)}
    keys = [info.key async for info in storage.list(f"{CHECKPOINTS}/")]
    steps = {key: step_of(key.split("/")[1]) for key in keys}
    gone = [key for key, step in steps.items() if whole and step is not None and step < whole[-1].version]
    await delete_manifests_first(storage, [key for key in gone if steps[key] not in kept])
