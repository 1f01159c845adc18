"""Objects into files: parallel ranges of one version, written aside, verified, renamed. For `S3Storage.get_file`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rayapp.errors import StorageCorruptError, StorageExistsError, StorageUnreachableError
from rayapp.storage.base import ObjectInfo
from rayapp.storage.files import aside, storage_errors
from rayapp.storage.hashing import hash_file
from rayapp.storage.location import Location
from rayapp.storage.together import together

if TYPE_CHECKING:
    from rayapp.storage.s3 import S3Storage


async def download(storage: S3Storage, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
    """Read one object into `path`. Raises what `Storage.get_file` says."""
    location, head = storage.location(key), await storage.head(key)
    num_bytes, expected = head["ContentLength"], sha256 or head["Metadata"].get("sha256", "")
    with aside(path) as temporary:
        await _fetch(storage, location, temporary, num_bytes, head["ETag"])
        found = await hash_file(temporary)
        if expected and found != expected:
            raise StorageCorruptError(
                f"{location}: its SHA-256 is {found[:12]}…, it should be {expected[:12]}…. The object is damaged "
                "or was replaced: write it again from its source."
            )
    return ObjectInfo(key=key, num_bytes=num_bytes, sha256=found)


async def _fetch(storage: S3Storage, location: Location, path: Path, num_bytes: int, etag: str) -> None:
    part_bytes = storage.settings.transfer.part_bytes
    try:
        with path.open("wb") as file, storage_errors(path):
            file.truncate(num_bytes)
            ranges = [(start, min(start + part_bytes, num_bytes)) for start in range(0, num_bytes, part_bytes)]
            await together(lambda ends: _fetch_range(storage, location, file.fileno(), *ends, etag), ranges)
            await asyncio.to_thread(os.fsync, file.fileno())
    except StorageExistsError as changed:
        raise StorageCorruptError(f"{location} was replaced while it was read; read it again") from changed


async def _fetch_range(
    storage: S3Storage, location: Location, descriptor: int, start: int, end: int, etag: str
) -> None:
    async def read() -> bytes:
        answer = await storage.client.get_object(
            Bucket=location.bucket, Key=location.key, Range=f"bytes={start}-{end - 1}", IfMatch=etag
        )
        async with answer["Body"] as body:
            data: bytes = await body.read()
        if len(data) != end - start:
            raise StorageUnreachableError(f"{location}: {len(data)} bytes of {end - start} came")
        return data

    async with storage.slots:
        data = await storage.retried(location, read)
        await asyncio.to_thread(os.pwrite, descriptor, data, start)
