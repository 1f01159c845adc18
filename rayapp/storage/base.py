"""The interface of storages. `LocalStorage` and `S3Storage` implement it; `open_storage` picks one.

    async with open_storage("s3://bucket/run1") as storage:
        await storage.put_file(Path("train.parquet"), "data/train.parquet")

Keys are relative to the opened folder. A written object becomes visible only when it is complete. `folders.py` stores
folders, which are complete once their manifest exists.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MAX_SMALL_BYTES = 64 << 20
"""Default limit of `get_bytes`, which reads into memory."""


Fence = Callable[[], Awaitable[float]]
"""Awaited before a write: returns the seconds within which it must end, or raises StorageError to forbid it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object."""

    key: str
    """Key relative to the opened folder."""
    num_bytes: int
    sha256: str = ""
    """Hex digest; empty in listings, and for objects written by other programs."""


class Storage(Protocol):
    """A folder, local or remote. Every method may raise a StorageError; `rayapp.core.errors` lists its kinds."""

    @property
    def uri(self) -> str: ...

    def fenced(self, fence: Fence) -> Storage:
        """Return the same folder with a fence: each request that changes it, retries included, awaits `fence` first."""
        ...

    async def put_bytes(self, data: bytes, key: str, *, if_absent: bool = False) -> ObjectInfo:
        """Write a small object.

        Raises:
            StorageExistsError: `if_absent` is set and the object exists. Of concurrent creators exactly one succeeds.
        """
        ...

    async def put_file(self, path: Path, key: str) -> ObjectInfo:
        """Write a file of any size in bounded memory, resuming an earlier try with the same content.

        Raises:
            StorageCorruptError: the file changed while it was read.
        """
        ...

    async def get_bytes(self, key: str, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        """Read a small object and verify its checksum.

        Raises:
            StorageNotFoundError: the object does not exist.
            StorageCorruptError: its checksum is wrong.
        """
        ...

    async def get_file(self, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
        """Read an object into `path`, which appears only when it is complete and its checksum is right.

        Args:
            sha256: expected checksum; empty uses the one stored beside the object, if there is one.
        """
        ...

    async def info(self, key: str) -> ObjectInfo | None:
        """Return the object's size and checksum; None if there is no object."""
        ...

    async def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield objects whose key begins with `prefix`, in key order, page by page."""
        ...

    async def delete(self, key: str) -> None:
        """Remove an object. Idempotent."""
        ...

    async def check(self) -> None:
        """Check that the storage is usable, so that a run fails before its first step."""
        ...
