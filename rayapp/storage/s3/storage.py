"""A folder in a bucket: what fits one part in one request, larger files in parallel parts. Made by `open_storage` only.

Every object carries its SHA-256 in its metadata, is checked against it when it is read, and its length when it was
written. Never holds more than `num_parallel` parts in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rayapp.storage.base import Fence, ObjectInfo
from rayapp.storage.s3.download import download
from rayapp.storage.s3.requests import S3Requests
from rayapp.storage.s3.upload import is_journal, upload


class S3Storage(S3Requests):
    """See `Storage` for what each method promises."""

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
