"""Storage in a folder of a bucket. A small object takes one request; larger files are sent in parallel parts.
`open_storage` makes it.

Every object has its SHA-256 in its metadata. Reads verify the SHA-256, writes the length. At most `num_parallel` parts
are in memory.

A download fetches ranges of one version of the object in parallel into a temporary file, verifies the file and renames
it. The SHA-256 is computed from finished ranges on disk while other ranges are still in transfer.

`s3_client` makes the aioboto3 client for all requests, configured from `S3Settings`.

`upload` sends a file in parallel parts, and can be resumed: parts that the server has are not sent again. A small
journal object beside the target names the current upload and its content, so that any process on any machine can resume
it. Therefore a failed upload is kept; a lifecycle rule of the bucket should end uploads that are never resumed
(AbortIncompleteMultipartUpload). The object appears when the last request completes it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rayapp.core.aio import finish_despite_cancels, together
from rayapp.core.errors import (
    StorageConfigError,
    StorageCorruptError,
    StorageError,
    StorageExistsError,
    StorageNotFoundError,
    StorageTakenError,
    StorageUnreachableError,
    one_error,
)
from rayapp.core.files import Location, storage_errors, stored
from rayapp.storage.base import Fence, FollowingHash, ObjectInfo, hash_file
from rayapp.storage.s3.requests import SHA256, Body, S3Requests, checksum_arguments
from rayapp.storage.settings import S3Settings

MAX_PARTS = 10_000
_JOURNAL = ".uploading"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upload:
    """One multipart upload, as the journal object stores it."""

    upload_id: str
    sha256: str
    num_bytes: int
    part_bytes: int

    @property
    def num_parts(self) -> int:
        return math.ceil(self.num_bytes / self.part_bytes)

    def part_length(self, number: int) -> int:
        """Return the number of bytes of a part; the first part has the number 1."""
        return min(self.part_bytes, self.num_bytes - (number - 1) * self.part_bytes)


def is_journal(key: str) -> bool:
    return key.endswith(_JOURNAL) and key.rpartition("/")[2].startswith(".")


def journal_key(key: str) -> str:
    folder, slash, name = key.rpartition("/")
    return f"{folder}{slash}.{name}{_JOURNAL}"


def part_bytes_for(num_bytes: int, part_bytes: int) -> int:
    """Return the part size: `part_bytes`, or the smallest multiple of 1 MiB above it with which the file has at most
    10,000 parts (S3's limit).
    """
    least = math.ceil(num_bytes / MAX_PARTS)
    return part_bytes if least <= part_bytes else math.ceil(least / (1 << 20)) * (1 << 20)


async def upload(storage: S3Requests, path: Path, key: str) -> ObjectInfo:
    """Send one file; see `Storage.put_file`."""
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
        raise StorageCorruptError(
            f"{path} changed while it was uploaded; nothing was written to {location}. Upload the file again"
        )
    await _complete(storage, location, key, current, etags)
    await storage.delete(journal_key(key))
    return ObjectInfo(key=key, num_bytes=current.num_bytes, sha256=sha256)


async def _resume(
    storage: S3Requests, location: Location, key: str, wanted: _Upload
) -> tuple[_Upload | None, dict[int, str]]:
    """Return the upload of the same content that can be resumed, and the ETags of its complete parts; (None, {})
    without one.
    """
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
        # Another process has completed or aborted the upload, or the server lost it: start over.
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
        raise StorageCorruptError(f"{path} became shorter while it was uploaded. Upload the file again")
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
        # Only the answer may have been lost: check whether the object was stored.
        if not await _is_there(storage, key, current):
            raise
    if not await _is_there(storage, key, current):
        raise StorageCorruptError(
            f"{location}: the stored object differs in size or checksum from the file of {current.num_bytes} bytes. "
            "Upload the file again"
        )


async def _is_there(storage: S3Requests, key: str, current: _Upload) -> bool:
    return await storage.info(key) == ObjectInfo(key=key, num_bytes=current.num_bytes, sha256=current.sha256)


async def _abort(storage: S3Requests, location: Location, current: _Upload) -> None:
    try:
        await storage.ask(location, "abort_multipart_upload", Key=location.key, UploadId=current.upload_id)
    except StorageError:
        return  # the upload no longer exists, or the bucket's lifecycle rule will end it


@asynccontextmanager
async def s3_client(settings: S3Settings) -> AsyncIterator[Any]:
    """Yield an open client, which is closed at the end of the block.

    Raises:
        StorageConfigError: the endpoint or region is invalid.
    """
    import aioboto3
    from aiobotocore.session import get_session
    from botocore.exceptions import BotoCoreError

    known = get_session()
    known.register_component("data_loader", _descriptions(known.get_config_variable("data_path")))
    session = aioboto3.Session(
        aws_access_key_id=settings.access_key_id,
        aws_secret_access_key=settings.secret_access_key,
        aws_session_token=settings.session_token,
        region_name=settings.region,
        botocore_session=known,
    )
    try:
        opening = session.client("s3", endpoint_url=settings.endpoint_url, config=_client_config(settings))
        client = await opening.__aenter__()
    except (BotoCoreError, ValueError) as error:
        raise StorageConfigError(
            f"the S3 client for {settings.endpoint_url or 'AWS'} can't be made: {error}"
        ) from error
    try:
        if settings.create_header != "If-None-Match":
            client.meta.events.register("before-call.s3", _renamer(settings.create_header))
        yield client
    finally:
        await opening.__aexit__(None, None, None)


@cache
def _descriptions(data_path: str | None) -> Any:
    """Return botocore's loader of service descriptions. It is kept with its cache, because reading the descriptions
    again would cost 0.3 s per client.
    """
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _client_config(settings: S3Settings) -> Any:
    from aiobotocore.config import AioConfig

    transfer = settings.transfer
    return AioConfig(
        signature_version=settings.signature_version,
        # The payload is not signed, because that would hash each body once more. Two other checksums protect bodies: a
        # CRC-32, which the server checks, and the SHA-256 stored with every object, which readers compare.
        s3={"addressing_style": settings.addressing_style, "payload_signing_enabled": False},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
        # The client makes one attempt, because `with_retries` repeats requests. Two layers of retries would multiply
        # the attempts.
        retries={"total_max_attempts": 1},
        connect_timeout=transfer.connect_timeout_s,
        read_timeout=transfer.read_timeout_s,
        max_pool_connections=2 * transfer.num_parallel,
    )


def _renamer(header: str) -> Any:
    """Return an event handler that renames the header If-None-Match to `header`, for services that don't know
    If-None-Match.
    """

    def rename(params: dict[str, Any], **_: object) -> None:
        if params["headers"].pop("If-None-Match", None) is not None:
            params["headers"][header] = "true"

    return rename


_CHUNK_BYTES = 1 << 18
_WRITE_BYTES = 1 << 20
"""Number of bytes per write: large enough for few calls, small enough to stay in the processor's cache."""
_MAX_VECTORS = 1024
"""Maximum number of buffers for one call of pwritev (IOV_MAX of Linux)."""


async def download(storage: S3Requests, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
    """Read one object into `path`; see `Storage.get_file`."""
    location, head = storage.location(key), await storage.head(key)
    num_bytes, expected = head["ContentLength"], sha256 or head["Metadata"].get("sha256", "")
    with stored(path) as temporary:
        found = await _fetch(storage, location, temporary, num_bytes, head["ETag"])
        if expected and found != expected:
            raise StorageCorruptError(
                f"{location}: its SHA-256 is {found[:12]}…, not {expected[:12]}…. The object is damaged "
                "or was replaced: write it again from its source."
            )
    return ObjectInfo(key=key, num_bytes=num_bytes, sha256=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The file into which a download writes."""

    path: Path
    descriptor: int

    async def write(self, chunks: Sequence[bytes], start: int) -> None:
        """Write the chunks at `start`. Raises StorageError: the disk refuses the write, e.g. because it is full."""
        # Finish the write even if this task is cancelled. Otherwise the write could continue after the file is closed,
        # to another file with the same descriptor.
        with storage_errors(self.path):
            await finish_despite_cancels(asyncio.to_thread(_write, self.descriptor, chunks, start))


async def _fetch(storage: S3Requests, location: Location, path: Path, num_bytes: int, etag: str) -> str:
    """Download the object into `path`, sync it to disk, and return its SHA-256."""
    part_bytes = storage.settings.transfer.part_bytes
    ranges = [(start, min(start + part_bytes, num_bytes)) for start in range(0, num_bytes, part_bytes)]
    try:
        with path.open("w+b") as file, storage_errors(path):
            file.truncate(num_bytes)
            target = _Target(path=path, descriptor=file.fileno())
            found = await _fetch_ranges(storage, location, target, ranges, etag)
            # Sync in a thread, so that the sync of `stored`, which runs on the event loop, has nothing left to write.
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
            raise StorageUnreachableError(f"{location}: only {num_bytes} of {end - start} bytes arrived")

    async with storage.slots:
        await storage.retried(location, read)


async def _pour(body: Any, target: _Target, start: int) -> int:
    """Write the received bytes to the file from `start` on, and return their number. A retry overwrites the same
    range.
    """
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
    """Write `chunks`, one after the other, from `start` on. This function blocks."""
    end = start + sum(map(len, chunks))
    start += os.pwritev(descriptor, chunks, start) if chunks else 0
    if start < end:
        # On a full disk a write stops early without an error; the next write raises the error.
        rest = b"".join(chunks)[start - end :]
        while rest:
            num_written = os.pwrite(descriptor, rest, start)
            rest, start = rest[num_written:], start + num_written


class S3Storage(S3Requests):
    """`Storage` in a folder of a bucket."""

    def fenced(self, fence: Fence) -> S3Storage:
        return S3Storage(self.client, self.root, self.settings, fence)

    async def put_file(self, path: Path, key: str) -> ObjectInfo:
        if (await asyncio.to_thread(path.stat)).st_size > self.settings.transfer.part_bytes:
            return await upload(self, path, key)
        async with self.slots:
            return await self._put(await asyncio.to_thread(path.read_bytes), key)

    async def get_file(self, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
        return await download(self, key, path, sha256=sha256)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        base = f"{self.root.key}/" if self.root.key else ""
        arguments: dict[str, Any] = {"Prefix": base + prefix, "MaxKeys": self.settings.transfer.keys_per_page}
        while True:
            page = await self.ask(self.root, "list_objects_v2", **arguments)
            for entry in page.get("Contents", ()):
                key = entry["Key"].removeprefix(base)
                if key and not key.endswith("/") and not is_journal(key):
                    yield ObjectInfo(key=key, num_bytes=entry["Size"])
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]
