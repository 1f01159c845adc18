"""Requests on single objects of a bucket, with checksums and retries: the base of `S3Storage`, uploads and downloads.

Every object has its SHA-256 in its metadata, with which reads are verified. Each write also sends a CRC, so that the
server refuses a damaged body. rayapp computes the CRC in a thread: the client library would compute it on the event
loop and, over TLS, append it to a chunked body, which not every service supports.

`with_retries` repeats requests. botocore's own retries are switched off.

`translate` converts botocore's exceptions to StorageErrors whose messages say what to do. `is_transient` returns True
for exceptions after which a retry may succeed.
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

from rayapp.core.errors import (
    StorageBucketError,
    StorageConfigError,
    StorageCorruptError,
    StorageCredentialsError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnreachableError,
    one_line,
)
from rayapp.core.files import Location, check_key
from rayapp.core.http import pauses_s
from rayapp.storage.base import MAX_SMALL_BYTES, Fence, ObjectInfo, hash_bytes
from rayapp.storage.settings import S3Settings

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId", "AuthFailure"}
_NOT_FOUND = {"NoSuchKey", "404", "NotFound"}
_EXISTS = {"PreconditionFailed", "412", "FileAlreadyExists", "ConditionalRequestConflict"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "XMinioAdminBucketQuotaExceeded"}
_STATUS_FULL = 507
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_TRANSIENT = {
    "InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout", "RequestTimeTooSkewed", "OperationAborted",
    "Throttling", "ThrottlingException", "TooManyRequests", "BadDigest", "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch", "IncompleteBody",
}  # fmt: skip


def error_code(error: BaseException) -> str:
    """Return the error code of the service from a botocore ClientError, e.g. NoSuchUpload; empty for any other
    error.
    """
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def is_transient(error: BaseException) -> bool:
    """Return True if the request that failed with this error may succeed later."""
    import aiohttp
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        if _is_full(error):
            return False
        return error_code(error) in _TRANSIENT or _status(error) >= 500 or _status(error) == 429
    transport = (boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, boto.ResponseStreamingError)
    if isinstance(error, (*transport, boto.FlexibleChecksumError)):
        return True
    return isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError, StorageUnreachableError))


def translate(error: Exception, location: Location, endpoint: str, *, attempts: int = 1) -> StorageError:
    """Convert an exception of botocore to a StorageError. A StorageError is returned unchanged."""
    from botocore import exceptions as boto

    if isinstance(error, StorageError):
        return error
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return StorageCredentialsError(
            f"{location}: the environment has no complete credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "(OSS: OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET)."
        )
    if isinstance(error, boto.ClientError) and not is_transient(error):
        return _client_error(error, location, endpoint)
    if is_transient(error):
        return StorageUnreachableError(
            f"{location}: {endpoint} did not answer properly in {attempts} tries; last: {_short(error)}. "
            "Check the endpoint (AWS_ENDPOINT_URL, OSS_REGION) and the network."
        )
    if isinstance(error, (boto.BotoCoreError, ValueError)):
        return StorageConfigError(f"{location}: invalid request: {_short(error)}")
    return StorageError(f"{location}: {_short(error)}")


def _client_error(error: Exception, location: Location, endpoint: str) -> StorageError:
    code, status = error_code(error), _status(error)
    if code == "NoSuchBucket":
        return StorageBucketError(
            f"{location}: there is no bucket {location.bucket!r} at {endpoint}. Create it, or correct its name."
        )
    if code in _EXPIRED:
        return StorageCredentialsError(f"{location}: the credentials have expired ({code}). Set new ones.")
    if code in _WRONG_KEY or status == 401:
        return StorageCredentialsError(
            f"{location}: {endpoint} does not accept these credentials ({code or status}). Check the access key and "
            "its secret."
        )
    if code in _NOT_FOUND or status == 404:
        return StorageNotFoundError(f"{location}: not found at {endpoint} ({code})")
    if code in _EXISTS or status in {409, 412}:
        return StorageExistsError(f"{location}: exists already ({code})")
    if _is_full(error):
        return StorageFullError(f"{location}: the storage is full ({code})")
    if code in _REGION or status == 301:
        return StorageConfigError(f"{location}: the bucket is in another region ({_short(error)}). Set AWS_REGION.")
    if status == 403:
        return StoragePermissionError(
            f"{location}: these credentials don't permit this ({code or 403}): {_short(error)}. They need permission "
            "to read, write and list this prefix."
        )
    return StorageError(f"{location}: {_short(error)}")


def _is_full(error: BaseException) -> bool:
    return error_code(error) in _FULL or _status(error) == _STATUS_FULL


def _status(error: BaseException) -> int:
    response: dict[str, Any] = getattr(error, "response", {})
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


class Body(io.BytesIO):
    """Bytes as the body of a request. They are not copied when the body is sent, as BytesIO would do."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._data = data

    def getbuffer(self) -> memoryview:
        return memoryview(self._data)


def checksum_arguments(data: bytes, checksums: str) -> dict[str, str]:
    """Return the checksum arguments of an upload. This function blocks while it hashes `data`.

    Args:
        checksums: value of `S3Settings.checksums`.
    """
    if checksums == "when_required":
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        return {"ContentMD5": base64.b64encode(digest).decode()}
    return {"ChecksumCRC32": base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()}


T = TypeVar("T")
_log = logging.getLogger(__name__)


async def with_retries(request: Callable[[], Awaitable[T]], location: Location, settings: S3Settings) -> T:
    """Send a request until it succeeds, fails permanently, or was sent `max_attempts` times. Return its answer.

    Raises:
        StorageError: the request failed. `translate` makes it from the last error.
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
    raise AssertionError("the last attempt neither returned nor raised an error, which is a bug")


SHA256 = "sha256"
WRITER = "writer"


class S3Requests:
    """Requests on one folder of a bucket.

    Args:
        client: an open aioboto3 client, which must stay open as long as this object is used.
        root: the folder to which keys are relative.
    """

    def __init__(self, client: Any, root: Location, settings: S3Settings, fence: Fence | None = None) -> None:
        self.client = client
        self.settings = settings
        # All transfers of this object share the slots, so that memory doesn't grow with the number of callers.
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
        """Send a request that changes stored objects, with retries. Each attempt first awaits the fence."""

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
                raise StorageError(f"{location} has {answer['ContentLength']} bytes: at most {max_bytes} can be read")
            async with answer["Body"] as body:
                return await body.read(), answer["Metadata"].get(SHA256, "")

        async with self.slots:
            data, sha256 = await self.retried(location, read)
        if sha256 and await asyncio.to_thread(hash_bytes, data) != sha256:
            raise StorageCorruptError(
                f"{location} is damaged: the SHA-256 of its {len(data)} bytes is not the one that was stored with it. "
                "Upload the object again"
            )
        return data

    async def info(self, key: str) -> ObjectInfo | None:
        try:
            head = await self.head(key)
        except StorageNotFoundError:
            return None
        return ObjectInfo(key=key, num_bytes=head["ContentLength"], sha256=head["Metadata"].get(SHA256, ""))

    async def head(self, key: str) -> dict[str, Any]:
        """Return length, ETag and metadata of an object. The error of a HEAD request has no text, so the cause of a
        failure is read from a listing.
        """
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
            # The object may be from an earlier attempt of this call, whose answer was lost.
            if not if_absent or (await self.head(key))["Metadata"].get(WRITER) != writer:
                raise StorageExistsError(f"{location} exists already: another writer was first") from error
        return ObjectInfo(key=key, num_bytes=len(data), sha256=sha256)
