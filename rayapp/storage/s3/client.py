"""The aioboto3 client that `S3Storage` talks through, configured from `S3Settings`. Nothing else makes one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from rayapp.core.errors import StorageConfigError
from rayapp.storage.settings import S3Settings


@asynccontextmanager
async def s3_client(settings: S3Settings) -> AsyncIterator[Any]:
    """Open a client, closed at the end of the block.

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
        raise StorageConfigError(f"S3 client for {settings.endpoint_url or 'AWS'}: {error}") from error
    try:
        if settings.create_header != "If-None-Match":
            client.meta.events.register("before-call.s3", _renamer(settings.create_header))
        yield client
    finally:
        await opening.__aexit__(None, None, None)


@cache
def _descriptions(data_path: str | None) -> Any:
    """Return botocore's loader with its cached service descriptions: reading them again costs 0.3 s per client."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


def _client_config(settings: S3Settings) -> Any:
    from aiobotocore.config import AioConfig

    transfer = settings.transfer
    return AioConfig(
        signature_version=settings.signature_version,
        # Bodies are covered by two other checksums: a CRC-32, which the server checks, and the SHA-256 stored with
        # every object, which readers compare. Signing the payload would hash each body once more.
        s3={"addressing_style": settings.addressing_style, "payload_signing_enabled": False},
        request_checksum_calculation=settings.checksums,
        response_checksum_validation=settings.checksums,
        # One attempt here: `with_retries` does the rest. Two layers would multiply, and only ours knows the deadline.
        retries={"total_max_attempts": 1},
        connect_timeout=transfer.connect_timeout_s,
        read_timeout=transfer.read_timeout_s,
        max_pool_connections=2 * transfer.num_parallel,
    )


def _renamer(header: str) -> Any:
    """Return an event handler that renames If-None-Match to the header of a service that doesn't know it."""

    def rename(params: dict[str, Any], **_: object) -> None:
        if params["headers"].pop("If-None-Match", None) is not None:
            params["headers"][header] = "true"

    return rename
