"""SHA-256 of files, read in slices in a thread: the event loop stays free, and memory stays flat."""

from __future__ import annotations

import asyncio
import hashlib
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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_SLICE_BYTES):
            digest.update(data)
    return digest.hexdigest()
