"""The interface of storages. `LocalStorage` and `S3Storage` implement it; `open_storage` picks one.

    async with open_storage("s3://bucket/run1") as storage:
        await storage.put_file(Path("train.parquet"), "data/train.parquet")

Keys are relative to the opened folder. A written object becomes visible only when it is complete. `folders.py` stores
folders, which are complete once their manifest exists.

Checksums of files are read in slices in threads: the event loop stays free, and memory use stays constant. SHA-256 is
for transfers; XXH3 for tens of GB of files on disk, where it must find damage, not forgery.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

MAX_SMALL_BYTES = 64 << 20
"""Default limit of `get_bytes`, which reads into memory."""


Fence = Callable[[], Awaitable[float]]
"""Function that is awaited before a write. Returns the seconds within which the write must end, or raises StorageError
to forbid it.
"""


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


_SLICE_BYTES = 1 << 20
_AT_ONCE = 4
XXH3, SHA256 = "xxh3_128", "sha256"
_ALGORITHMS: Mapping[str, Callable[[], Any]] = {XXH3: xxhash.xxh3_128, SHA256: hashlib.sha256}


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def hash_file(path: Path) -> str:
    """Return the hex SHA-256 of a file's contents.

    Raises:
        OSError: the file can't be read.
    """
    return await asyncio.to_thread(_digest, path, SHA256)


def both_digests(path: Path) -> tuple[str, str]:
    """Return a file's hex XXH3 and SHA-256. Reads the file once; blocks.

    Raises:
        OSError: the file can't be read.
    """
    xxh3, sha256 = _digests(path, (XXH3, SHA256))
    return xxh3, sha256


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the hex XXH3 of files in a folder, by name. Reads several at once; blocks.

    Raises:
        OSError: a file can't be read.
    """
    wanted = list(names)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="checksums") as threads:
        return dict(zip(wanted, threads.map(lambda name: _digest(folder / name, XXH3), wanted), strict=True))


def _digest(path: Path, algorithm: str) -> str:
    return _digests(path, (algorithm,))[0]


def _digests(path: Path, algorithms: Sequence[str]) -> list[str]:
    # Read the file instead of mapping it: if the disk fails under a mapping, SIGBUS ends the process.
    with path.open("rb", buffering=0) as file:
        digests, buffer = [_ALGORITHMS[name]() for name in algorithms], memoryview(bytearray(_SLICE_BYTES))
        while num_read := file.readinto(buffer):
            for digest in digests:
                digest.update(buffer[:num_read])
        return [str(digest.hexdigest()) for digest in digests]


class FollowingHash:
    """SHA-256 of a file that is still being written: fed one range after the other, in order.

    Reuses one buffer; not safe to use from two threads at once.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._digest = descriptor, hashlib.sha256()
        self._buffer = memoryview(bytearray(_SLICE_BYTES))

    def read(self, start: int, end: int) -> None:
        """Add the file's bytes from `start` to `end`; blocks.

        Raises:
            OSError: the bytes can't be read, or the file ends before `end`.
        """
        while start < end:
            num_read = os.preadv(self._descriptor, [self._buffer[: end - start]], start)
            if num_read == 0:
                raise OSError(f"the file ends at byte {start}, before {end}")
            self._digest.update(self._buffer[:num_read])
            start += num_read

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
