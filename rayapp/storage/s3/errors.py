"""Converts botocore's exceptions to StorageErrors with a way out, and tells which ones a retry may fix."""

from __future__ import annotations

import asyncio
from typing import Any

from rayapp.core.errors import (
    StorageBucketError,
    StorageConfigError,
    StorageCredentialsError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnreachableError,
    one_line,
)
from rayapp.core.files import Location

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
    """Return the service's code of a botocore ClientError, e.g. NoSuchUpload; empty for any other error."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed later."""
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
    """Convert an exception of botocore; a StorageError passes unchanged."""
    from botocore import exceptions as boto

    if isinstance(error, StorageError):
        return error
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return StorageCredentialsError(
            f"{location}: no credentials in the environment. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
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
        return StorageCredentialsError(f"{location}: the credentials have expired ({code}). Put new ones in place.")
    if code in _WRONG_KEY or status == 401:
        return StorageCredentialsError(f"{location}: {endpoint} does not accept these credentials ({code or status}).")
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
            f"{location}: these credentials may not do this ({code or 403}): {_short(error)}. "
            "They need to read, write and list this prefix."
        )
    return StorageError(f"{location}: {_short(error)}")


def _is_full(error: BaseException) -> bool:
    return error_code(error) in _FULL or _status(error) == _STATUS_FULL


def _status(error: BaseException) -> int:
    response: dict[str, Any] = getattr(error, "response", {})
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
