"""What every storage can do. Two kinds implement it: `LocalStorage` and `S3Storage`; `open_storage` picks one.

    async with open_storage("s3://bucket/run1") as storage:
        await storage.put_file(Path("train.parquet"), "data/train.parquet")

Keys are relative to the folder that was opened. A write is there whole or not at all. Folders that count as whole only
with their manifest are built on top of this in `folders.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MAX_SMALL_BYTES = 64 << 20
"""Most that `get_bytes` reads into memory unless told otherwise."""


Fence = Callable[[], Awaitable[float]]
"""Awaited before a write: seconds within which it must end. Raises StorageError where it must not begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object."""

    key: str
    """Relative to the opened folder."""
    num_bytes: int
    sha256: str = ""
    """Hex; empty where the storage doesn't know it: in listings, and for objects written by other programs."""


class Storage(Protocol):
    """A folder, local or remote. Every method may raise a StorageError; see `rayapp.core.errors` for the tree."""

    @property
    def uri(self) -> str: ...

    def fenced(self, fence: Fence) -> Storage:
        """The same folder; each request that changes it, a retry too, awaits `fence` first."""
        ...

    async def put_bytes(self, data: bytes, key: str, *, if_absent: bool = False) -> ObjectInfo:
        """Write a small object.

        Raises:
            StorageExistsError: `if_absent`, and it is there. Of several concurrent creators exactly one succeeds.
        """
        ...

    async def put_file(self, path: Path, key: str) -> ObjectInfo:
        """Write a file of any size in bounded memory, going on where an earlier try of the same content stopped.

        Raises:
            StorageCorruptError: the file changed while it was read.
        """
        ...

    async def get_bytes(self, key: str, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        """Read a small object and verify its checksum.

        Raises:
            StorageNotFoundError: there is none.
            StorageCorruptError: it is not what was written.
        """
        ...

    async def get_file(self, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
        """Read an object into `path`, which appears only when it is whole and its checksum is right.

        Args:
            sha256: what it must be; empty compares with the checksum stored beside the object, where there is one.
        """
        ...

    async def info(self, key: str) -> ObjectInfo | None:
        """What is stored under `key`; None when nothing is."""
        ...

    async def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in the order of their keys, page by page."""
        ...

    async def delete(self, key: str) -> None:
        """Remove it. Removing what isn't there is no error."""
        ...

    async def check(self) -> None:
        """Ask the storage whether it can be used, so that a run fails before its first step and not after."""
        ...
