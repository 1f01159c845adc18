"""Uploads files in parallel parts, resumable: received parts are not sent again. Called by `S3Storage.put_file` only.

A small journal object beside the target names the current upload and its content, so that another process, on another
machine, can resume it. A failed upload stays for that purpose; a lifecycle rule of the bucket should end abandoned ones
(AbortIncompleteMultipartUpload). The object appears when the last request completes it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rayapp.core.aio import together
from rayapp.core.errors import StorageCorruptError, StorageError, StorageNotFoundError, StorageTakenError
from rayapp.core.files import Location
from rayapp.storage.base import ObjectInfo
from rayapp.storage.hashing import hash_file
from rayapp.storage.s3.requests import SHA256, Body, S3Requests, checksum_arguments

MAX_PARTS = 10_000
_JOURNAL = ".uploading"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upload:
    """One multipart upload; the journal's content."""

    upload_id: str
    sha256: str
    num_bytes: int
    part_bytes: int

    @property
    def num_parts(self) -> int:
        return math.ceil(self.num_bytes / self.part_bytes)

    def part_length(self, number: int) -> int:
        """Return the number of bytes of part 1, 2, …"""
        return min(self.part_bytes, self.num_bytes - (number - 1) * self.part_bytes)


def is_journal(key: str) -> bool:
    return key.endswith(_JOURNAL) and key.rpartition("/")[2].startswith(".")


def journal_key(key: str) -> str:
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}.{name}{_JOURNAL}"


def part_bytes_for(num_bytes: int, part_bytes: int) -> int:
    """Return the configured part size, or the next MiB that keeps the file within S3's 10,000 parts."""
    least = math.ceil(num_bytes / MAX_PARTS)
    return part_bytes if least <= part_bytes else math.ceil(least / (1 << 20)) * (1 << 20)


async def upload(storage: S3Requests, path: Path, key: str) -> ObjectInfo:
    """Send one file. Raises like `Storage.put_file`."""
    location, before = storage.location(key), await asyncio.to_thread(path.stat)
    sha256 = await hash_file(path)
    part_bytes = part_bytes_for(before.st_size, storage.settings.transfer.part_bytes)
    wanted = _Upload(upload_id="", sha256=sha256, num_bytes=before.st_size, part_bytes=part_bytes)
    current, etags = await _resume(storage, location, key, wanted)
    if current is None:
        current = await _start(storage, location, key, wanted)
    etags = await _send_parts(storage, location, path, current, etags)
    after = await asyncio.to_thread(path.stat)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        await storage.ask(location, "abort_multipart_upload", Key=location.key, UploadId=current.upload_id)
        raise StorageCorruptError(f"{path} changed while it was uploaded; nothing was written to {location}")
    await _complete(storage, location, key, current, etags)
    await storage.delete(journal_key(key))
    return ObjectInfo(key=key, num_bytes=current.num_bytes, sha256=sha256)


async def _resume(
    storage: S3Requests, location: Location, key: str, wanted: _Upload
) -> tuple[_Upload | None, dict[int, str]]:
    """Return the current upload of the same content, and the ETags of its complete parts."""
    try:
        journal = json.loads(await storage.get_bytes(journal_key(key)))
        found = _Upload(**journal)
    except (StorageNotFoundError, StorageCorruptError, ValueError, TypeError):
        return None, {}
    if (found.sha256, found.num_bytes, found.part_bytes) != (wanted.sha256, wanted.num_bytes, wanted.part_bytes):
        await _abort(storage, location, found)
        return None, {}
    try:
        return found, await _parts_there(storage, location, found)
    except StorageError:
        # Completed or aborted meanwhile, or lost in a restart of the server: start over.
        return None, {}


async def _parts_there(storage: S3Requests, location: Location, current: _Upload) -> dict[int, str]:
    arguments: dict[str, Any] = {"Key": location.key, "UploadId": current.upload_id}
    etags: dict[int, str] = {}
    while True:
        page = await storage.ask(location, "list_parts", **arguments)
        for part in page.get("Parts", ()):
            number = part["PartNumber"]
            if number <= current.num_parts and part["Size"] == current.part_length(number):
                etags[number] = part["ETag"]
        if not page.get("IsTruncated"):
            return etags
        arguments["PartNumberMarker"] = page["NextPartNumberMarker"]


async def _start(storage: S3Requests, location: Location, key: str, wanted: _Upload) -> _Upload:
    metadata = {SHA256: wanted.sha256}
    answer = await storage.ask(location, "create_multipart_upload", Key=location.key, Metadata=metadata)
    started = replace(wanted, upload_id=answer["UploadId"])
    await storage.put_bytes(json.dumps(asdict(started)).encode(), journal_key(key))
    return started


async def _send_parts(
    storage: S3Requests, location: Location, path: Path, current: _Upload, etags: dict[int, str]
) -> dict[int, str]:
    missing = [number for number in range(1, current.num_parts + 1) if number not in etags]
    sent = dict(etags)

    async def send(number: int) -> None:
        async with storage.slots:
            data = await asyncio.to_thread(_read_part, path, current, number)
            checksum = await asyncio.to_thread(checksum_arguments, data, storage.settings.checksums)
            answer = await storage.retried(location, lambda: storage.client.upload_part(
                Bucket=location.bucket, Key=location.key, UploadId=current.upload_id, PartNumber=number,
                Body=Body(data), **checksum,
            ))  # fmt: skip
            sent[number] = answer["ETag"]

    await together(send, missing)
    return sent


def _read_part(path: Path, current: _Upload, number: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.pread(descriptor, current.part_length(number), (number - 1) * current.part_bytes)
    finally:
        os.close(descriptor)
    if len(data) != current.part_length(number):
        raise StorageCorruptError(f"{path} became shorter while it was uploaded")
    return data


async def _complete(storage: S3Requests, location: Location, key: str, current: _Upload, etags: dict[int, str]) -> None:
    parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
    try:
        await storage.change(location, lambda: storage.client.complete_multipart_upload(
            Bucket=location.bucket, Key=location.key, UploadId=current.upload_id, MultipartUpload={"Parts": parts},
        ))  # fmt: skip
    except StorageTakenError:
        raise
    except StorageError:
        # The answer may have been lost: look at the stored object to find out whether it worked.
        if not await _is_there(storage, key, current):
            raise
    if not await _is_there(storage, key, current):
        raise StorageCorruptError(
            f"{location}: the uploaded object does not have {current.num_bytes} bytes with the right checksum"
        )


async def _is_there(storage: S3Requests, key: str, current: _Upload) -> bool:
    return await storage.info(key) == ObjectInfo(key=key, num_bytes=current.num_bytes, sha256=current.sha256)


async def _abort(storage: S3Requests, location: Location, current: _Upload) -> None:
    try:
        await storage.ask(location, "abort_multipart_upload", Key=location.key, UploadId=current.upload_id)
    except StorageError:
        return  # already gone; if not, the bucket's lifecycle rule ends it
