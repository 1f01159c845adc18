"""Objects into files: parallel ranges of one version, written aside, verified, renamed. For `S3Storage.get_file`.

A file's hash follows behind its ranges while later ones are still on their way, reading back what was written.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayapp.errors import StorageCorruptError, StorageExistsError, StorageUnreachableError, first_error
from rayapp.interrupts import to_the_end
from rayapp.storage.base import ObjectInfo
from rayapp.storage.files import aside, storage_errors
from rayapp.storage.hashing import FollowingHash
from rayapp.storage.location import Location

if TYPE_CHECKING:
    from rayapp.storage.s3 import S3Storage

_CHUNK_BYTES = 1 << 18
_MAX_VECTORS = 1024
"""Most buffers that one call of pwritev takes (IOV_MAX of Linux)."""


async def download(storage: S3Storage, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
    """Read one object into `path`. Raises what `Storage.get_file` says."""
    location, head = storage.location(key), await storage.head(key)
    num_bytes, expected = head["ContentLength"], sha256 or head["Metadata"].get("sha256", "")
    with aside(path) as temporary:
        found = await _fetch(storage, location, temporary, num_bytes, head["ETag"])
        if expected and found != expected:
            raise StorageCorruptError(
                f"{location}: its SHA-256 is {found[:12]}…, it should be {expected[:12]}…. The object is damaged "
                "or was replaced: write it again from its source."
            )
    return ObjectInfo(key=key, num_bytes=num_bytes, sha256=found)


async def _fetch(storage: S3Storage, location: Location, path: Path, num_bytes: int, etag: str) -> str:
    """The object's bytes in `path`, on the disk; returns their SHA-256."""
    part_bytes = storage.settings.transfer.part_bytes
    ranges = [(start, min(start + part_bytes, num_bytes)) for start in range(0, num_bytes, part_bytes)]
    try:
        with path.open("w+b") as file, storage_errors(path):
            file.truncate(num_bytes)
            found = await _fetch_ranges(storage, location, file.fileno(), ranges, etag)
            await to_the_end(asyncio.to_thread(os.fsync, file.fileno()))
    except StorageExistsError as changed:
        raise StorageCorruptError(f"{location} was replaced while it was read; read it again") from changed
    return found


async def _fetch_ranges(
    storage: S3Storage, location: Location, descriptor: int, ranges: Sequence[tuple[int, int]], etag: str
) -> str:
    hashing = FollowingHash(descriptor)
    try:
        async with asyncio.TaskGroup() as group:
            written = [group.create_task(_fetch_range(storage, location, descriptor, *ends, etag)) for ends in ranges]
            for ends, task in zip(ranges, written, strict=True):
                await task
                await to_the_end(asyncio.to_thread(hashing.read, *ends))
    except BaseExceptionGroup as failed:
        raise first_error(failed) from failed
    return hashing.hexdigest()


async def _fetch_range(
    storage: S3Storage, location: Location, descriptor: int, start: int, end: int, etag: str
) -> None:
    async def read() -> list[bytes]:
        answer = await storage.client.get_object(
            Bucket=location.bucket, Key=location.key, Range=f"bytes={start}-{end - 1}", IfMatch=etag
        )
        async with (body := answer["Body"]):
            # Chunks as they come: one object of a whole part would copy each byte once more.
            chunks = [chunk async for chunk in body.iter_chunks(_CHUNK_BYTES)]
        if (num_bytes := sum(map(len, chunks))) != end - start:
            raise StorageUnreachableError(f"{location}: {num_bytes} bytes of {end - start} came")
        return chunks

    async with storage.slots:
        chunks = await storage.retried(location, read)
        # Not left behind when this is cancelled: the file is closed then, and its number may be another file's.
        await to_the_end(asyncio.to_thread(_write, descriptor, chunks, start))


def _write(descriptor: int, chunks: Sequence[bytes], start: int) -> None:
    """Write `chunks` one after the other at `start`; blocks."""
    for first in range(0, len(chunks), _MAX_VECTORS):
        some = chunks[first : first + _MAX_VECTORS]
        end = start + sum(map(len, some))
        start += os.pwritev(descriptor, some, start)
        if start < end:
            # A disk that fills up stops a write in the middle. The next one says why.
            rest = b"".join(some)[start - end :]
            while rest:
                num_written = os.pwrite(descriptor, rest, start)
                rest, start = rest[num_written:], start + num_written
