"""Stores folders: first the files, last the manifest. A folder is complete when its manifest exists.

Readers verify each file with it, so they never take a partial upload, or files of two writers, for a folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.aio import together
from rayapp.core.errors import StorageCorruptError, StorageError, StorageExistsError, StorageNotFoundError
from rayapp.core.files import check_key, is_aside, storage_errors
from rayapp.storage.base import ObjectInfo, Storage, hash_file

MANIFEST = "manifest.json"
FORMAT = 1
_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The list of files of a complete folder: `{"format": 1, "files": {"train.parquet": {"num_bytes": 12345, "sha256":
    "9f…"}}}`."""

    files: Mapping[str, ObjectInfo]  # key -> size and SHA-256

    def dump(self) -> bytes:
        files = {key: {"num_bytes": info.num_bytes, "sha256": info.sha256} for key, info in sorted(self.files.items())}
        return json.dumps({"format": FORMAT, "files": files}, indent=1).encode()

    @classmethod
    def load(cls, data: bytes, where: str) -> Manifest:
        try:
            raw = json.loads(data)
            if raw["format"] != FORMAT:
                raise StorageError(
                    f"{where} has format {raw['format']}, but this version of rayapp reads only format {FORMAT}: use "
                    "the version that wrote it"
                )
            files = {
                check_key(key): ObjectInfo(key=key, num_bytes=int(entry["num_bytes"]), sha256=str(entry["sha256"]))
                for key, entry in raw["files"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageCorruptError(f"{where} is not a manifest: {error!r}") from error
        return cls(files=files)


async def put_folder(folder: Path, storage: Storage, *, overwrite: bool = False) -> Manifest:
    """Write the files of a local folder, and then its manifest. A call after a failure sends only the missing files.

    StorageExistsError: there is other content. With `overwrite` its manifest is deleted first: no reader gets files of
    both.
    """
    manifest = await _scan(folder)
    there = await read_manifest(storage)
    if there == manifest:
        return manifest
    if there is not None:
        if not overwrite:
            raise StorageExistsError(
                f"{storage.uri} already holds different files. Choose another folder, or overwrite this one."
            )
        await storage.delete(MANIFEST)

    async def put(info: ObjectInfo) -> None:
        if await put_missing(storage, folder / info.key, info.key) != info:
            raise StorageCorruptError(f"{folder / info.key} changed while the folder was stored; store it again")

    await together(put, manifest.files.values(), at_once=_AT_ONCE)
    await storage.put_bytes(manifest.dump(), MANIFEST)
    return manifest


async def get_folder(storage: Storage, folder: Path) -> Manifest:
    """Read a complete folder and verify every file; right local ones are kept. StorageNotFoundError: no manifest."""
    manifest = await read_manifest(storage)
    if manifest is None:
        raise StorageNotFoundError(
            f"{storage.uri} has no {MANIFEST}: the folder does not exist, or its upload did not finish. Run the upload "
            "again."
        )

    async def get(info: ObjectInfo) -> None:
        path = folder / info.key
        is_here = path.is_file() and path.stat().st_size == info.num_bytes
        if not is_here or await hash_file(path) != info.sha256:
            await storage.get_file(info.key, path, sha256=info.sha256)

    await together(get, manifest.files.values(), at_once=_AT_ONCE)
    return manifest


async def read_manifest(storage: Storage) -> Manifest | None:
    """Return the folder's manifest; None if the folder is incomplete."""
    try:
        data = await storage.get_bytes(MANIFEST)
    except StorageNotFoundError:
        return None
    return Manifest.load(data, f"{storage.uri}/{MANIFEST}")


async def put_missing(storage: Storage, path: Path, key: str) -> ObjectInfo:
    """Write the file at `path`, unless an object with its size and checksum is stored. Return the stored object."""
    size = (await asyncio.to_thread(path.stat)).st_size
    wanted = ObjectInfo(key=key, num_bytes=size, sha256=await hash_file(path))
    there = await storage.info(key)
    return there if there == wanted else await storage.put_file(path, key)


async def delete_manifests_first(storage: Storage, keys: Sequence[str]) -> None:
    """Delete objects, manifests first: if this process is killed meanwhile, no incomplete folder has a manifest."""
    manifests = [key for key in keys if key.rpartition("/")[2] == MANIFEST]
    for batch in (manifests, keys):
        await together(storage.delete, batch, at_once=_AT_ONCE)


async def _scan(folder: Path) -> Manifest:
    def paths() -> list[Path]:
        return [path for path in sorted(folder.rglob("*")) if path.is_file() and not is_aside(path.name)]

    files = {}
    for path in await asyncio.to_thread(paths):
        key = check_key(path.relative_to(folder).as_posix())
        if key != MANIFEST:
            with storage_errors(path):
                files[key] = ObjectInfo(key=key, num_bytes=path.stat().st_size, sha256=await hash_file(path))
    if not files:
        raise StorageNotFoundError(f"{folder} has no files to store")
    return Manifest(files=files)
