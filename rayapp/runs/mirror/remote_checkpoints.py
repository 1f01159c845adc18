"""Checkpoints of a run in object storage: which are whole, how one is sent, fetched and pruned.

The same folders as on disk. Their manifest goes last and names, beside each file's size, its SHA-256. Called by the
uploader and by the restore.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.core.aio import together
from rayapp.core.errors import StorageCorruptError, StorageNotFoundError
from rayapp.core.files import put_in_place, remove_tree, write_text
from rayapp.runs.checkpoints import Checkpoint, parse_manifest, to_keep
from rayapp.runs.mirror.layout import CHECKPOINTS, checkpoint_step
from rayapp.storage.base import ObjectInfo, Storage
from rayapp.storage.folders import MANIFEST, delete_manifests_first, put_missing
from rayapp.storage.hashing import hash_file

_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A whole checkpoint in object storage; `described.path` is the key of its folder."""

    described: Checkpoint
    manifest: dict[str, Any]

    @property
    def key(self) -> str:
        return self.described.path.as_posix()


async def whole_checkpoints(storage: Storage) -> list[RemoteCheckpoint]:
    """Those with a manifest whose files are all there with their sizes, oldest first."""
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
    """Send what the checkpoint at `folder` holds, but not its manifest.

    Returns:
        The manifest to send when everything else is safe.
    Raises:
        StorageError; OSError: it was pruned meanwhile.
    """
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    sha256: dict[str, str] = {}

    async def send(name: str) -> None:
        found = await hash_file(folder / name)
        info = ObjectInfo(key=f"{key}/{name}", num_bytes=manifest["files"][name], sha256=found)
        sha256[name] = (await put_missing(storage, folder / name, info)).sha256

    await together(send, manifest["files"], at_once=_AT_ONCE)
    return manifest | {"sha256": sha256}


async def fetch(storage: Storage, checkpoint: RemoteCheckpoint, run: Path) -> Path:
    """Read a checkpoint into the run folder `run`, every file verified; it appears whole.

    Raises:
        StorageCorruptError: a file is not what was written.
        StorageError: it can't be read.
    """
    target = run / checkpoint.key
    pending = target.with_name(f".pending-{target.name}")
    sums = checkpoint.manifest.get("sha256", {})

    async def get(name: str) -> None:
        await storage.get_file(f"{checkpoint.key}/{name}", pending / name, sha256=sums.get(name, ""))

    await asyncio.to_thread(remove_tree, pending)
    await together(get, checkpoint.manifest["files"], at_once=_AT_ONCE)
    await asyncio.to_thread(write_text, pending / MANIFEST, json.dumps(checkpoint.manifest, indent=1))
    await asyncio.to_thread(put_in_place, pending, target)
    return target


async def prune(storage: Storage, keep_last: int, keep_best: int) -> Sequence[str]:
    """Delete checkpoints that are neither recent nor best, and torn ones older than the newest whole one.

    Returns:
        The keys of the folders that are gone.
    """
    whole = [checkpoint.described for checkpoint in await whole_checkpoints(storage)]
    if not whole:
        return ()
    kept = tuple(f"{checkpoint.path.as_posix()}/" for checkpoint in to_keep(whole, keep_last, keep_best))
    keys = [info.key async for info in storage.list(f"{CHECKPOINTS}/") if not info.key.startswith(kept)]
    gone = [key for key in keys if (step := checkpoint_step(key)) is not None and step < whole[-1].version]
    await delete_manifests_first(storage, gone)
    return sorted({"/".join(key.split("/")[:2]) for key in gone})
