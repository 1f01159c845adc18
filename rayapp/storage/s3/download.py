"""Objects into files: parallel ranges of one version, written aside, verified, renamed. For `S3Storage.get_file`.

A file's hash follows behind its ranges while later ones are still on their way, reading back what was written.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.core.aio import finish_despite_cancels
from rayapp.core.errors import StorageCorruptError, StorageExistsError, StorageUnreachableError, one_error
from rayapp.core.files import storage_errors, stored
from rayapp.core.location import Location
from rayapp.storage.base import ObjectInfo
from rayapp.storage.hashing import FollowingHash
from rayapp.storage.s3.requests import S3Requests

_CHUNK_BYTES = 1 << 18
_WRITE_BYTES = 1 << 20
"""Written at once: large enough for few calls, small enough to stay in the processor's cache and off the memory."""
_MAX_VECTORS = 1024
"""Most buffers that one call of pwritev takes (IOV_MAX of Linux)."""


async def download(storage: S3Requests, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
    """Read one object into `path`. Raises what `Storage.get_file` says."""
    location, head = storage.location(key), await storage.head(key)
    num_bytes, expected = head["ContentLength"], sha256 or head["Metadata"].get("sha256", "")
    with stored(path) as temporary:
        found = await _fetch(storage, location, temporary, num_bytes, head["ETag"])
        if expected and found != expected:
            raise StorageCorruptError(
                f"{location}: its SHA-256 is {found[:12]}…, it should be {expected[:12]}…. The object is damaged "
                "or was replaced: write it again from its source."
            )
    return ObjectInfo(key=key, num_bytes=num_bytes, sha256=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The file that is being filled."""

    path: Path
    descriptor: int

    async def write(self, chunks: Sequence[bytes], start: int) -> None:
        """Raises StorageFullError and the like: the disk does not take them."""
        # Not left behind when this is cancelled: the file is closed then, and its number may be another file's.
        with storage_errors(self.path):
            await finish_despite_cancels(asyncio.to_thread(_write, self.descriptor, chunks, start))


async def _fetch(storage: S3Requests, location: Location, path: Path, num_bytes: int, etag: str) -> str:
    """The object's bytes in `path`, on the disk; returns their SHA-256."""
    part_bytes = storage.settings.transfer.part_bytes
    ranges = [(start, min(start + part_bytes, num_bytes)) for start in range(0, num_bytes, part_bytes)]
    try:
        with path.open("w+b") as file, storage_errors(path):
            file.truncate(num_bytes)
            target = _Target(path=path, descriptor=file.fileno())
            found = await _fetch_ranges(storage, location, target, ranges, etag)
            # In a thread, since the one when `stored` ends is on the event loop: it finds nothing left to write.
            await finish_despite_cancels(asyncio.to_thread(os.fsync, file.fileno()))
    except StorageExistsError as changed:
        raise StorageCorruptError(f"{location} was replaced while it was read; read it again") from changed
    return found


async def _fetch_ranges(
    storage: S3Requests, location: Location, target: _Target, ranges: Sequence[tuple[int, int]], etag: str
) -> str:
    hashing = FollowingHash(target.descriptor)
    with one_error():
        async with asyncio.TaskGroup() as group:
            written = [group.create_task(_fetch_range(storage, location, target, *ends, etag)) for ends in ranges]
            for ends, task in zip(ranges, written, strict=True):
                await task
                await finish_despite_cancels(asyncio.to_thread(hashing.read, *ends))
    return hashing.hexdigest()


async def _fetch_range(
    storage: S3Requests, location: Location, target: _Target, start: int, end: int, etag: str
) -> None:
    async def read() -> None:
        answer = await storage.client.get_object(
            Bucket=location.bucket, Key=location.key, Range=f"bytes={start}-{end - 1}", IfMatch=etag
        )
        async with (body := answer["Body"]):
            num_bytes = await _pour(body, target, start)
        if num_bytes != end - start:
            raise StorageUnreachableError(f"{location}: {num_bytes} bytes of {end - start} came")

    async with storage.slots:
        await storage.retried(location, read)


async def _pour(body: Any, target: _Target, start: int) -> int:
    """Write what comes, where it belongs; returns how much that was. A try again writes the same place again."""
    chunks: list[bytes] = []
    num_written = num_held = 0
    async for chunk in body.iter_chunks(_CHUNK_BYTES):
        chunks.append(chunk)
        num_held += len(chunk)
        if num_held >= _WRITE_BYTES or len(chunks) == _MAX_VECTORS:
            await target.write(chunks, start + num_written)
            num_written, num_held, chunks = num_written + num_held, 0, []
    await target.write(chunks, start + num_written)
    return num_written + num_held


def _write(descriptor: int, chunks: Sequence[bytes], start: int) -> None:
    """Write `chunks` one after the other at `start`; blocks."""
    end = start + sum(map(len, chunks))
    start += os.pwritev(descriptor, chunks, start) if chunks else 0
    if start < end:
        # A disk that fills up stops a write in the middle. The next one says why.
        rest = b"".join(chunks)[start - end :]
        while rest:
            num_written = os.pwrite(descriptor, rest, start)
            rest, start = rest[num_written:], start + num_written
