"""Checksums of files, read in slices in threads: the event loop stays free, and memory use stays constant.

SHA-256 for transfers; XXH3 for tens of GB of files on disk, where it must find damage, not forgery.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    # Read, not mapped: if a disk fails under a map, the process ends with SIGBUS.
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
