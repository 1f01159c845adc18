"""The interface of storages. `LocalStorage` and `S3Storage` implement it; `open_storage` opens one of them by its URI.

    async with open_storage("s3://bucket/run1") as storage:
        await storage.put_file(Path("train.parquet"), "data/train.parquet")

Keys are relative to the opened folder. An object becomes visible only when it is complete. `folders.py` stores whole
folders, which are complete when their manifest exists.

Files are hashed in slices and in threads, so that the event loop is not blocked and memory use is constant. Transfers
use SHA-256. Files on disk, which may have tens of GB, use XXH3, which is faster and finds damage but not forgery.
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
"""Default limit in bytes of `get_bytes`, which reads an object into memory."""


Fence = Callable[[], Awaitable[float]]
"""Function that is awaited before a write. It returns the seconds within which the write must end, or raises a
StorageError to forbid the write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object."""

    key: str
    """Key relative to the opened folder."""
    num_bytes: int
    sha256: str = ""
    """SHA-256 of the contents, in hex; empty in listings, and for objects that other programs wrote."""


class Storage(Protocol):
    """A folder on a disk or in object storage. Every method may raise a StorageError; `core.errors` lists the kinds."""

    @property
    def uri(self) -> str: ...

    def fenced(self, fence: Fence) -> Storage:
        """Return the same folder with a fence: every request that changes the folder, including retries, first awaits
        `fence`.
        """
        ...

    async def put_bytes(self, data: bytes, key: str, *, if_absent: bool = False) -> ObjectInfo:
        """Write a small object.

        Raises:
            StorageExistsError: `if_absent` is set and the object exists. If several writers create it at the same time,
                exactly one succeeds.
        """
        ...

    async def put_file(self, path: Path, key: str) -> ObjectInfo:
        """Write a file of any size in bounded memory. An earlier try with the same content is resumed.

        Raises:
            StorageCorruptError: the file changed while it was read.
        """
        ...

    async def get_bytes(self, key: str, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        """Read a small object and verify its checksum.

        Raises:
            StorageNotFoundError: the object does not exist.
            StorageCorruptError: the object's checksum is wrong.
        """
        ...

    async def get_file(self, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
        """Read an object into `path`, which appears only when it is complete and its checksum is right.

        Args:
            sha256: expected checksum; empty: the one that is stored with the object, if there is one.
        """
        ...

    async def info(self, key: str) -> ObjectInfo | None:
        """Return the object's size and checksum; None if there is no object."""
        ...

    async def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose key begins with `prefix`, sorted by key. They are listed page by page."""
        ...

    async def delete(self, key: str) -> None:
        """Remove an object. Idempotent."""
        ...

    async def check(self) -> None:
        """Check that the storage can be used, so that a run with a wrong location fails before its first step."""
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
    """Return a file's XXH3 and SHA-256, in hex. This blocking function reads the file once.

    Raises:
        OSError: the file can't be read.
    """
    xxh3, sha256 = _digests(path, (XXH3, SHA256))
    return xxh3, sha256


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the XXH3 of files in a folder, by name, in hex. This blocking function reads several files at the same
    time.

    Raises:
        OSError: a file can't be read.
    """
    wanted = list(names)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="checksums") as threads:
        return dict(zip(wanted, threads.map(lambda name: _digest(folder / name, XXH3), wanted), strict=True))


def _digest(path: Path, algorithm: str) -> str:
    return _digests(path, (algorithm,))[0]


def _digests(path: Path, algorithms: Sequence[str]) -> list[str]:
    # The file is read, not mapped: if the disk failed under a mapping, SIGBUS would end the process.
    with path.open("rb", buffering=0) as file:
        digests, buffer = [_ALGORITHMS[name]() for name in algorithms], memoryview(bytearray(_SLICE_BYTES))
        while num_read := file.readinto(buffer):
            for digest in digests:
                digest.update(buffer[:num_read])
        return [str(digest.hexdigest()) for digest in digests]


class FollowingHash:
    """SHA-256 of a file that is still being written. It reads one range of the file after the other, with one buffer,
    so only one thread may use it at a time.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._digest = descriptor, hashlib.sha256()
        self._buffer = memoryview(bytearray(_SLICE_BYTES))

    def read(self, start: int, end: int) -> None:
        """Add the file's bytes from `start` to `end` to the hash. This method blocks.

        Raises:
            OSError: the bytes can't be read, or the file ends before `end`.
        """
        while start < end:
            num_read = os.preadv(self._descriptor, [self._buffer[: end - start]], start)
            if num_read == 0:
                raise OSError(f"the file ends at byte {start}, before byte {end}")
            self._digest.update(self._buffer[:num_read])
            start += num_read

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
