"""Checksums of files, read in slices in threads: the event loop stays free, and memory stays flat.

SHA-256 for what travels; XXH3 for what lies on a disk, tens of GB at a time, where the question is damage, not forgery.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

_SLICE_BYTES = 1 << 20
_AT_ONCE = 4
XXH3, SHA256 = "xxh3_128", "sha256"
_ALGORITHMS: Mapping[str, Callable[[], Any]] = {XXH3: xxhash.xxh3_128, SHA256: hashlib.sha256}


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def hash_file(path: Path) -> str:
    """Hex SHA-256 of a file's contents.

    Raises:
        OSError: it can't be read.
    """
    return await asyncio.to_thread(_digest, path, SHA256)


def hash_files(folder: Path, names: Iterable[str], algorithm: str = XXH3) -> dict[str, str]:
    """Hex checksums of files of a folder, by name, several at once; blocks.

    Raises:
        OSError: one can't be read.
    """
    wanted = list(names)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="checksums") as threads:
        return dict(zip(wanted, threads.map(lambda name: _digest(folder / name, algorithm), wanted), strict=True))


def _digest(path: Path, algorithm: str) -> str:
    # Read, not mapped: a disk that fails under a map ends the process with SIGBUS.
    with path.open("rb", buffering=0) as file:
        digest, buffer = _ALGORITHMS[algorithm](), memoryview(bytearray(_SLICE_BYTES))
        while num_read := file.readinto(buffer):
            digest.update(buffer[:num_read])
        return str(digest.hexdigest())


class FollowingHash:
    """SHA-256 of a file that is still being written: fed range after range, in order, as each is complete.

    One buffer for all of it; not safe to use from two threads at once.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._digest = descriptor, hashlib.sha256()
        self._buffer = memoryview(bytearray(_SLICE_BYTES))

    def read(self, start: int, end: int) -> None:
        """Take in the bytes from `start` to `end` as they are in the file; blocks.

        Raises:
            OSError: they can't be read, or the file ends before `end`.
        """
        while start < end:
            num_read = os.preadv(self._descriptor, [self._buffer[: end - start]], start)
            if num_read == 0:
                raise OSError(f"the file ends at byte {start}, before {end}")
            self._digest.update(self._buffer[:num_read])
            start += num_read

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
