"""The interface of storages, and checksums of files.

Keys are relative to the opened folder. An object becomes visible only when it is complete. Transfers use SHA-256; files
on disk, which may have tens of GB, XXH3, which finds damage but not forgery.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

MAX_SMALL_BYTES = 64 << 20  # for `get_bytes`, which reads an object into memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    key: str  # relative to the opened folder
    num_bytes: int
    sha256: str = ""  # of the contents, in hex; empty in listings, and for objects of other programs


class Storage(Protocol):
    """A folder on a disk or in object storage. Every method may raise a StorageError; `core.errors` lists the kinds."""

    @property
    def uri(self) -> str: ...

    async def put_bytes(self, data: bytes, key: str, *, if_absent: bool = False) -> ObjectInfo:
        """Write a small object. StorageExistsError: `if_absent`, and one exists; of several writers one succeeds."""
        ...

    async def put_file(self, path: Path, key: str) -> ObjectInfo:
        """Write a file of any size. StorageCorruptError: the file changed while it was read."""
        ...

    async def get_bytes(self, key: str, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        """Read a small object and verify its checksum."""
        ...

    async def get_file(self, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
        """Read an object into `path`, which appears only when it is complete and has the checksum `sha256`, or the one
        that is stored with the object."""
        ...

    async def info(self, key: str) -> ObjectInfo | None:
        """Return the object's size and checksum; None if there is no object."""
        ...

    async def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Yield the objects whose key begins with `prefix`, sorted by key."""
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
    return await asyncio.to_thread(_digest, path, SHA256)


def hash_files(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the XXH3 of files in a folder, by name, in hex. Blocks; reads several files at once."""
    wanted = list(names)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="checksums") as threads:
        return dict(zip(wanted, threads.map(lambda name: _digest(folder / name, XXH3), wanted), strict=True))


def _digest(path: Path, algorithm: str) -> str:
    # The file is read, not mapped: if the disk failed under a mapping, SIGBUS would end the process.
    with path.open("rb", buffering=0) as file:
        digest, buffer = _ALGORITHMS[algorithm](), memoryview(bytearray(_SLICE_BYTES))
        while num_read := file.readinto(buffer):
            digest.update(buffer[:num_read])
        return str(digest.hexdigest())
