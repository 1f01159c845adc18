"""Storage in a folder of a bucket, on aioboto3. `rayapp.storage.opening` makes it.

Every object has its SHA-256 in its metadata: reads verify it, and writes of files compare it afterwards. Large files
are sent and fetched in parallel parts; a file appears only when it is complete. botocore repeats failed requests;
`get_bytes` and `get_file` repeat reads whose body was cut.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import aioboto3
import aiohttp
from aiobotocore.config import AioConfig
from boto3.s3.transfer import TransferConfig
from botocore import exceptions as boto

from rayapp.core.aio import together
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
from rayapp.core.files import Location, check_key, stored
from rayapp.storage.base import MAX_SMALL_BYTES, SHA256, ObjectInfo, hash_bytes, hash_file
from rayapp.storage.settings import S3Settings

MAX_PARTS = 10_000
_FILES_AT_ONCE = 2
_READS = 3
T = TypeVar("T")


def part_bytes_for(num_bytes: int, part_bytes: int) -> int:
    """Return `part_bytes`, or the smallest multiple of 1 MiB with which the file has at most 10,000 parts."""
    least = math.ceil(num_bytes / MAX_PARTS)
    return part_bytes if least <= part_bytes else math.ceil(least / (1 << 20)) * (1 << 20)


def _read_part(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


class S3Storage:
    """`Storage` in a folder of a bucket, with an open client."""

    def __init__(self, client: Any, root: Location, settings: S3Settings) -> None:
        self._client, self._root, self._settings = client, root, settings
        self._slots = asyncio.Semaphore(_FILES_AT_ONCE)

    @property
    def uri(self) -> str:
        return str(self._root)

    async def put_bytes(self, data: bytes, key: str, *, if_absent: bool = False) -> ObjectInfo:
        sha256 = await asyncio.to_thread(hash_bytes, data)
        condition = {"IfNoneMatch": "*"} if if_absent else {}
        try:
            await self._ask("put_object", key, Body=data, Metadata={SHA256: sha256}, **condition)
        except StorageExistsError:
            # The object may be from an earlier attempt of this call, whose answer was lost.
            if await self.get_bytes(key) != data:
                raise
        return ObjectInfo(key=key, num_bytes=len(data), sha256=sha256)

    async def put_file(self, path: Path, key: str) -> ObjectInfo:
        before = await asyncio.to_thread(path.stat)
        if before.st_size <= self._settings.transfer.part_bytes:
            return await self.put_bytes(await asyncio.to_thread(path.read_bytes), key)
        location, sha256 = self._location(key), await hash_file(path)
        wanted = ObjectInfo(key=key, num_bytes=before.st_size, sha256=sha256)
        async with self._slots:
            # A completion whose first answer was lost finds no upload when it is repeated.
            with suppress(StorageNotFoundError), self._explained(location):
                await self._upload(path, before, location, {SHA256: sha256})
        if await self.info(key) != wanted:
            raise StorageCorruptError(f"{location} is not stored as it was sent from {path}. Upload the file again")
        return wanted

    async def _upload(self, path: Path, before: os.stat_result, location: Location, metadata: dict[str, str]) -> None:
        """Send a file in parallel parts. aioboto3's own upload holds up to a hundred parts in memory, and hangs where a
        part fails while its queue is full."""
        place = {"Bucket": location.bucket, "Key": location.key}
        size = part_bytes_for(before.st_size, self._settings.transfer.part_bytes)
        parts: dict[int, dict[str, Any]] = {}
        started = await self._client.create_multipart_upload(**place, Metadata=metadata)
        upload = place | {"UploadId": started["UploadId"]}

        async def send(number: int) -> None:
            data = await asyncio.to_thread(_read_part, path, (number - 1) * size, size)
            answer = await self._client.upload_part(**upload, PartNumber=number, Body=data)
            parts[number] = {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            numbers = range(1, math.ceil(before.st_size / size) + 1)
            await together(send, numbers, at_once=self._settings.transfer.num_parallel)
            after = await asyncio.to_thread(path.stat)
            if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise StorageCorruptError(f"{path} changed while it was uploaded to {location}. Upload the file again")
            listed = {"Parts": [parts[number] for number in numbers]}
            await self._client.complete_multipart_upload(**upload, MultipartUpload=listed)
        except BaseException:
            with suppress(Exception):  # the bucket's lifecycle rule ends it
                await self._client.abort_multipart_upload(**upload)
            raise

    async def get_bytes(self, key: str, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        location = self._location(key)

        async def read() -> tuple[bytes, str]:
            answer = await self._client.get_object(Bucket=location.bucket, Key=location.key)
            if answer["ContentLength"] > max_bytes:
                answer["Body"].close()
                raise StorageError(f"{location} has {answer['ContentLength']} bytes: at most {max_bytes} can be read")
            async with answer["Body"] as body:
                return await body.read(), answer["Metadata"].get(SHA256, "")

        data, sha256 = await self._repeated(location, read)
        found = await asyncio.to_thread(hash_bytes, data)
        self._compare(location, found, sha256)
        return data

    async def get_file(self, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
        location = self._location(key)
        with stored(path) as temporary:

            async def read() -> dict[str, Any]:
                head: dict[str, Any] = await self._client.head_object(Bucket=location.bucket, Key=location.key)
                with temporary.open("wb") as file:
                    config = self._parts(head["ContentLength"])
                    await self._client.download_fileobj(
                        location.bucket, location.key, file, ExtraArgs={"IfMatch": head["ETag"]}, Config=config
                    )
                return head

            async with self._slots:
                try:
                    head = await self._repeated(location, read)
                except StorageExistsError as error:
                    raise StorageCorruptError(f"{location} was replaced while it was read; read it again") from error
                except StorageError as error:
                    if type(error) in (StorageError, StorageNotFoundError):
                        await self.check()  # the answer of a HEAD request has no text: let a listing say the cause
                    raise
            found = await hash_file(temporary)
            self._compare(location, found, sha256 or head["Metadata"].get(SHA256, ""))
        return ObjectInfo(key=key, num_bytes=head["ContentLength"], sha256=found)

    async def info(self, key: str) -> ObjectInfo | None:
        try:
            head = await self._ask("head_object", key)
        except StorageNotFoundError:
            return None
        return ObjectInfo(key=key, num_bytes=head["ContentLength"], sha256=head["Metadata"].get(SHA256, ""))

    async def exists(self, key: str) -> bool:
        return await self.info(key) is not None

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        base = f"{self._root.key}/" if self._root.key else ""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._root.bucket, Prefix=base + prefix)
        with self._explained(self._root):
            async for page in pages:
                for entry in page.get("Contents", ()):
                    key = entry["Key"].removeprefix(base)
                    if key and not key.endswith("/"):
                        yield ObjectInfo(key=key, num_bytes=entry["Size"])

    async def delete(self, key: str) -> None:
        await self._ask("delete_object", key)

    async def check(self) -> None:
        with self._explained(self._root):
            await self._client.list_objects_v2(Bucket=self._root.bucket, Prefix=self._root.key, MaxKeys=1)

    def _location(self, key: str) -> Location:
        return self._root.join(check_key(key))

    def _parts(self, num_bytes: int) -> TransferConfig:
        transfer = self._settings.transfer
        size = part_bytes_for(num_bytes, transfer.part_bytes)
        return TransferConfig(multipart_chunksize=size, multipart_threshold=size, max_concurrency=transfer.num_parallel)

    async def _ask(self, operation: str, key: str, **arguments: Any) -> Any:
        location = self._location(key)
        with self._explained(location):
            return await getattr(self._client, operation)(Bucket=location.bucket, Key=location.key, **arguments)

    @contextmanager
    def _explained(self, location: Location) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # boundary: every exception of the client library becomes a StorageError
            raise translate(error, location, self._settings) from error

    async def _repeated(self, location: Location, read: Callable[[], Awaitable[T]]) -> T:
        """Repeat a read whose body was cut: botocore repeats only requests without an answer."""
        for _ in range(_READS - 1):
            try:
                return await read()
            except Exception as error:  # boundary: as in `_explained`
                if not isinstance(_cause(error), _CUT):
                    raise translate(error, location, self._settings) from error
        with self._explained(location):
            return await read()

    @staticmethod
    def _compare(location: Location, found: str, expected: str) -> None:
        if expected and found != expected:
            raise StorageCorruptError(
                f"{location}: its SHA-256 is {found[:12]}…, not {expected[:12]}…. The object is damaged or was "
                "replaced: write it again from its source."
            )


_CUT = (boto.IncompleteReadError, boto.ResponseStreamingError, aiohttp.ClientPayloadError, boto.FlexibleChecksumError)
_TRANSPORT = (*_CUT, boto.HTTPClientError, boto.ConnectionError, aiohttp.ClientError, TimeoutError, ConnectionError)
_NO_CREDENTIALS = (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)
_KEY = "{at} does not accept these credentials ({code}). Check the access key and its secret."
_RIGHTS = (
    "these credentials don't permit this ({code}): {text}. They need permission to read, write and list this prefix."
)
# Codes and HTTP statuses, error, text; the first line that has the code or the status counts.
_CODES: tuple[tuple[str, type[StorageError], str], ...] = (
    ("NoSuchBucket", StorageBucketError, "there is no bucket {bucket!r} at {at}. Create it, or correct its name."),
    ("ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired", StorageCredentialsError,
     "the credentials have expired ({code}). Set new ones."),
    ("InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidClientTokenId AuthFailure 401",
     StorageCredentialsError, _KEY),
    ("NoSuchKey NotFound 404", StorageNotFoundError, "not found at {at} ({code})"),
    ("PreconditionFailed FileAlreadyExists ConditionalRequestConflict 409 412", StorageExistsError,
     "exists already ({code}): another writer was first"),
    ("QuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded InsufficientStorage 507", StorageFullError,
     "the storage is full ({code})"),
    ("PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException 301", StorageConfigError,
     "the bucket is in another region ({text}). Set AWS_REGION."),
    ("403", StoragePermissionError, _RIGHTS),
)  # fmt: skip


def _cause(error: BaseException) -> BaseException:
    """Return the client's error, which aioboto3's downloads wrap in a bare Exception."""
    return error.__cause__ if type(error) is Exception and error.__cause__ is not None else error


def translate(error: Exception, location: Location, settings: S3Settings) -> StorageError:
    cause, at, status = _cause(error), settings.endpoint_url or "AWS", 0
    text = f"{type(cause).__name__}: {one_line(cause)}"
    if isinstance(cause, StorageError):
        return cause
    if isinstance(cause, _NO_CREDENTIALS):
        return StorageCredentialsError(
            f"{location}: the environment has no complete credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "(OSS: OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET)."
        )
    if isinstance(cause, boto.ClientError):
        code = str(cause.response.get("Error", {}).get("Code", ""))
        status = int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        for codes, kind, words in _CODES:
            if {code, str(status)} & set(codes.split()):
                return kind(
                    f"{location}: {words.format(bucket=location.bucket, at=at, code=code or status, text=text)}"
                )
    if status >= 500 or status == 429 or isinstance(cause, _TRANSPORT):
        return StorageUnreachableError(
            f"{location}: {at} did not answer properly in {settings.transfer.max_attempts} tries; last: {text}. Check "
            "the endpoint (AWS_ENDPOINT_URL, OSS_REGION) and the network."
        )
    if isinstance(cause, (boto.BotoCoreError, ValueError)):
        return StorageConfigError(f"{location}: invalid request: {text}")
    return StorageError(f"{location}: {text}")


@asynccontextmanager
async def opened(location: Location, settings: S3Settings) -> AsyncIterator[S3Storage]:
    async with s3_client(settings) as client:
        yield S3Storage(client, location, settings)


@asynccontextmanager
async def s3_client(settings: S3Settings) -> AsyncIterator[Any]:
    """Yield an open client. Raises StorageConfigError: the endpoint or region is invalid."""
    session = aioboto3.Session(
        aws_access_key_id=settings.access_key_id,
        aws_secret_access_key=settings.secret_access_key,
        aws_session_token=settings.session_token,
        region_name=settings.region,
    )
    transfer = settings.transfer
    config = AioConfig(
        signature_version=settings.signature_version,
        # The payload is not signed, because that would hash each body once more: two other checksums protect it.
        s3={"addressing_style": settings.addressing_style, "payload_signing_enabled": False},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
        retries={"mode": "standard", "total_max_attempts": transfer.max_attempts},
        connect_timeout=transfer.connect_timeout_s,
        read_timeout=transfer.read_timeout_s,
        max_pool_connections=4 * transfer.num_parallel,
    )
    try:
        opening = session.client("s3", endpoint_url=settings.endpoint_url, config=config)
        client = await opening.__aenter__()
    except (boto.BotoCoreError, ValueError) as error:
        raise StorageConfigError(
            f"the S3 client for {settings.endpoint_url or 'AWS'} can't be made: {error}"
        ) from error
    try:
        yield client
    finally:
        await opening.__aexit__(None, None, None)
