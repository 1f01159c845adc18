"""SHA-256 of files, read in slices in a thread: the event loop stays free, and memory stays flat."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

_SLICE_BYTES = 1 << 20


def hash_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def hash_file(path: Path) -> str:
    """Hex SHA-256 of a file's contents.

    Raises:
        OSError: it can't be read.
    """
    return await asyncio.to_thread(_hash_file, path)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
