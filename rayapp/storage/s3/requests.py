"""Requests on single objects of a bucket, with checksums and retries: the base of `S3Storage`, uploads and downloads.

Every object carries its SHA-256 in its metadata, and is verified against it when it is read. Each write also sends a
CRC, with which the server refuses damaged bodies. It is computed here, in a thread: the client would compute it on the
event loop, and over TLS wrap the body in chunks to append it, which not every service reads.

`with_retries` repeats requests. botocore's own retries are switched off.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import logging
import uuid
import zlib
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, TypeVar

from rayapp.core.errors import StorageCorruptError, StorageError, StorageExistsError, StorageNotFoundError
from rayapp.core.files import Location, check_key
from rayapp.core.http import pauses_s
from rayapp.storage.base import MAX_SMALL_BYTES, Fence, ObjectInfo
from rayapp.storage.hashing import hash_bytes
from rayapp.storage.s3.errors import is_transient, translate
from rayapp.storage.settings import S3Settings


class Body(io.BytesIO):
    """Bytes as a request body. Its buffer is the bytes themselves: BytesIO would copy them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._data = data

    def getbuffer(self) -> memoryview:
        return memoryview(self._data)


def checksum_arguments(data: bytes, checksums: str) -> dict[str, str]:
    """Return the checksum arguments of an upload. Blocks the calling thread while it hashes `data`.

    Args:
        checksums: `S3Settings.checksums`.
    """
    if checksums == "when_required":
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        return {"ContentMD5": base64.b64encode(digest).decode()}
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}


T = TypeVar("T")
_log = logging.getLogger(__name__)


async def with_retries(request: Callable[[], Awaitable[T]], location: Location, settings: S3Settings) -> T:
    """Await `request` until it succeeds, fails permanently, or `max_attempts` is reached. Returns its answer.

    Raises:
        StorageError: translated from the last error.
    """
    transfer = settings.transfer
    endpoint = settings.endpoint_url or "AWS"
    pauses = pauses_s(transfer.first_pause_s, transfer.longest_pause_s)
    for attempt, wait_s in enumerate(islice(pauses, transfer.max_attempts), start=1):
        try:
            return await request()
        except Exception as error:  # boundary: every exception of the client library becomes a StorageError
            if attempt == transfer.max_attempts or not is_transient(error):
                raise translate(error, location, endpoint, attempts=attempt) from error
            _log.info("%s: try %d failed (%s), next in %.1f s", location, attempt, type(error).__name__, wait_s)
        await asyncio.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


SHA256 = "sha256"
WRITER = "writer"


class S3Requests:
    """Requests on one folder of a bucket.

    Args:
        client: an open aioboto3 client, which outlives this object.
        root: the folder that keys are relative to.
    """

    def __init__(self, client: Any, root: Location, settings: S3Settings, fence: Fence | None = None) -> None:
        self.client = client
        self.settings = settings
        # Shared by all transfers of this object, so that memory doesn't grow with the number of callers.
        self.slots = asyncio.Semaphore(settings.transfer.num_parallel)
        self.root, self._fence = root, fence

    @property
    def uri(self) -> str:
        return str(self.root)

    def location(self, key: str) -> Location:
        return self.root.join(check_key(key))

    async def ask(self, location: Location, operation: str, **arguments: Any) -> Any:
        """Send one request with retries and return the raw answer."""
        call = getattr(self.client, operation)
        return await self.retried(location, lambda: call(Bucket=location.bucket, **arguments))

    async def change(self, location: Location, request: Callable[[], Awaitable[T]]) -> T:
        """Send a request that changes what readers see, with retries; each attempt passes the fence first."""

        async def fenced_request() -> T:
            limit_s = await self._fence() if self._fence is not None else None
            async with asyncio.timeout(limit_s):
                return await request()

        return await self.retried(location, fenced_request)

    async def retried(self, location: Location, request: Callable[[], Awaitable[T]]) -> T:
        return await with_retries(request, location, self.settings)

    async def put_bytes(self, data: bytes, key: str, *, if_absent: bool = False) -> ObjectInfo:
        async with self.slots:
            return await self._put(data, key, if_absent=if_absent)

    async def get_bytes(self, key: str, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        location = self.location(key)

        async def read() -> tuple[bytes, str]:
            answer = await self.client.get_object(Bucket=location.bucket, Key=location.key)
            if answer["ContentLength"] > max_bytes:
                answer["Body"].close()
                raise StorageError(f"{location} has {answer['ContentLength']} bytes, at most {max_bytes} are read")
            async with answer["Body"] as body:
                return await body.read(), answer["Metadata"].get(SHA256, "")

        async with self.slots:
            data, sha256 = await self.retried(location, read)
        if sha256 and await asyncio.to_thread(hash_bytes, data) != sha256:
            raise StorageCorruptError(
                f"{location}: SHA-256 of its {len(data)} bytes is not the one it was written with"
            )
        return data

    async def info(self, key: str) -> ObjectInfo | None:
        try:
            head = await self.head(key)
        except StorageNotFoundError:
            return None
        return ObjectInfo(key=key, num_bytes=head["ContentLength"], sha256=head["Metadata"].get(SHA256, ""))

    async def head(self, key: str) -> dict[str, Any]:
        """Return length, ETag and metadata. HEAD failures carry no text, so the cause is read from a listing."""
        location = self.location(key)
        try:
            answer: dict[str, Any] = await self.ask(location, "head_object", Key=location.key)
        except StorageError:
            await self.check()
            raise
        return answer

    async def exists(self, key: str) -> bool:
        return await self.info(key) is not None

    async def delete(self, key: str) -> None:
        location = self.location(key)
        await self.change(location, lambda: self.client.delete_object(Bucket=location.bucket, Key=location.key))

    async def check(self) -> None:
        await self.ask(self.root, "list_objects_v2", Prefix=self.root.key, MaxKeys=1)

    async def _put(self, data: bytes, key: str, *, if_absent: bool = False) -> ObjectInfo:
        location, writer = self.location(key), uuid.uuid4().hex
        sha256 = await asyncio.to_thread(hash_bytes, data)
        extra = await asyncio.to_thread(checksum_arguments, data, self.settings.checksums)
        extra |= {"IfNoneMatch": "*"} if if_absent else {}
        arguments = {"Bucket": location.bucket, "Key": location.key, "Metadata": {SHA256: sha256, WRITER: writer}}
        try:
            await self.change(location, lambda: self.client.put_object(Body=Body(data), **arguments, **extra))
        except StorageExistsError as error:
            # The answer to an earlier attempt may have been lost: then the existing object is our own.
            if not if_absent or (await self.head(key))["Metadata"].get(WRITER) != writer:
                raise StorageExistsError(f"{location} exists already: another writer was first") from error
        return ObjectInfo(key=key, num_bytes=len(data), sha256=sha256)
