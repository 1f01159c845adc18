"""Stores folders: first the files, last the manifest. A folder is complete when its manifest exists.

    claim.json (conditional create) -> missing files in parallel -> manifest.json

Readers first read the manifest and verify each file with it, so they never take a partial upload for a complete one.
The claim holds the digest of the content, so that two writers don't mix their files: an upload of the same content
continues, and an upload of other content is refused.
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
from rayapp.storage.base import ObjectInfo, Storage, hash_bytes, hash_file

MANIFEST, CLAIM = "manifest.json", "claim.json"
FORMAT = 1
_AT_ONCE = 4
"""Number of files that are sent at the same time. The storage limits the parts of all files together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The list of files of a complete folder.

    Example: `{"format": 1, "files": {"train.parquet": {"num_bytes": 12345, "sha256": "9f…"}}}`.
    """

    files: Mapping[str, ObjectInfo]
    """Key -> size and SHA-256 of the file."""

    def dump(self) -> bytes:
        files = {key: {"num_bytes": info.num_bytes, "sha256": info.sha256} for key, info in sorted(self.files.items())}
        return json.dumps({"format": FORMAT, "files": files}, indent=1).encode()

    @property
    def digest(self) -> str:
        """Return a digest of the files. Equal files have equal digests."""
        return hash_bytes(self.dump())

    @classmethod
    def load(cls, data: bytes, where: str) -> Manifest:
        """Parse a manifest.

        Raises:
            StorageCorruptError: the data are not a manifest in the format of this version.
        """
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

    Args:
        overwrite: replace other content. Its manifest is deleted first, so that no reader gets files of both.

    Raises:
        StorageExistsError: other content is stored or being uploaded, and `overwrite` is not set.
    """
    manifest = await _scan(folder)
    there = await read_manifest(storage)
    if there is not None and there.digest == manifest.digest:
        return manifest
    await _claim(storage, manifest, there, overwrite=overwrite)
    if there is not None:
        await storage.delete(MANIFEST)
    await together(lambda info: _put_one(storage, folder, info), manifest.files.values(), at_once=_AT_ONCE)
    await _still_ours(storage, manifest)
    await storage.put_bytes(manifest.dump(), MANIFEST)
    return manifest


async def get_folder(storage: Storage, folder: Path) -> Manifest:
    """Read a complete folder and verify every file. Local files with the right checksum are kept.

    Raises:
        StorageNotFoundError: there is no manifest: the folder does not exist, or its upload did not finish.
    """
    manifest = await read_manifest(storage)
    if manifest is None:
        raise StorageNotFoundError(
            f"{storage.uri} has no {MANIFEST}: the folder does not exist, or its upload did not finish. Run the upload "
            "again."
        )
    await together(lambda info: _get_one(storage, folder, info), manifest.files.values(), at_once=_AT_ONCE)
    return manifest


async def read_manifest(storage: Storage) -> Manifest | None:
    """Return the folder's manifest; None if the folder is incomplete."""
    try:
        data = await storage.get_bytes(MANIFEST)
    except StorageNotFoundError:
        return None
    return Manifest.load(data, f"{storage.uri}/{MANIFEST}")


async def put_missing(storage: Storage, path: Path, info: ObjectInfo) -> ObjectInfo:
    """Write the file at `path`, unless an object with the key, size and checksum of `info` is stored. Return the
    `ObjectInfo` of the stored object.
    """
    there = await storage.info(info.key)
    return there if there == info else await storage.put_file(path, info.key)


async def delete_manifests_first(storage: Storage, keys: Sequence[str]) -> None:
    """Delete objects, manifests first: if this process is killed meanwhile, no incomplete folder has a manifest."""
    manifests = [key for key in keys if key.rpartition("/")[2] == MANIFEST]
    for batch in (manifests, keys):
        await together(storage.delete, batch, at_once=_AT_ONCE)


async def _scan(folder: Path) -> Manifest:
    def names() -> list[str]:
        found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not is_aside(path.name))
        return [path.relative_to(folder).as_posix() for path in found]

    files = {}
    for key in await asyncio.to_thread(names):
        if key in {MANIFEST, CLAIM}:
            continue
        path = folder / check_key(key)
        with storage_errors(path):
            files[key] = ObjectInfo(key=key, num_bytes=path.stat().st_size, sha256=await hash_file(path))
    if not files:
        raise StorageNotFoundError(f"{folder} has no files to store")
    return Manifest(files=files)


async def _claim(storage: Storage, manifest: Manifest, there: Manifest | None, *, overwrite: bool) -> None:
    claim = json.dumps({"content": manifest.digest}).encode()
    if overwrite:
        await storage.put_bytes(claim, CLAIM)
        return
    if there is not None:
        raise StorageExistsError(
            f"{storage.uri} already holds different files. Choose another folder, or overwrite this one."
        )
    try:
        await storage.put_bytes(claim, CLAIM, if_absent=True)
    except StorageExistsError:
        await _still_ours(storage, manifest)


async def _still_ours(storage: Storage, manifest: Manifest) -> None:
    try:
        claimed = json.loads(await storage.get_bytes(CLAIM))["content"]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageCorruptError(f"{storage.uri}/{CLAIM} is malformed: {error!r}. Overwrite the folder.") from error
    if claimed != manifest.digest:
        raise StorageExistsError(
            f"{storage.uri} is claimed by another writer, whose content differs: its upload is running or was "
            "interrupted. Choose another folder, or overwrite this one if no upload is running."
        )


async def _put_one(storage: Storage, folder: Path, info: ObjectInfo) -> None:
    if await put_missing(storage, folder / info.key, info) != info:
        raise StorageCorruptError(f"{folder / info.key} changed while the folder was stored; store the folder again")


async def _get_one(storage: Storage, folder: Path, info: ObjectInfo) -> None:
    path = folder / info.key
    if path.is_file() and path.stat().st_size == info.num_bytes and await hash_file(path) == info.sha256:
        return
    await storage.get_file(info.key, path, sha256=info.sha256)
