"""`open_storage`: the one way to a Storage, local or remote."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rayapp.core.files import Location
from rayapp.storage.base import Storage
from rayapp.storage.local import LocalStorage
from rayapp.storage.settings import S3Settings, settings_from_environment


@asynccontextmanager
async def open_storage(uri: str, *, settings: S3Settings | None = None) -> AsyncIterator[Storage]:
    """Open the folder at `uri` for the length of the block.

    Args:
        uri: a path, or s3://bucket/prefix.
        settings: None reads the environment.

    Raises:
        StorageConfigError: the location or the settings are invalid. Only `check` finds out if the storage answers.
    """
    location = Location.parse(uri)
    if not location.is_remote:
        yield LocalStorage(Path(location.key))
        return
    # boto's imports take half a second: pay for them only if S3 is used.
    from rayapp.storage.s3.client import s3_client
    from rayapp.storage.s3.storage import S3Storage

    chosen = settings or settings_from_environment()
    async with s3_client(chosen) as client:
        yield S3Storage(client, location, chosen)
