"""Writing files so that a crash leaves the old ones or the new ones, and saying what is safe when the disk is full.

Used by whatever writes into a run folder. Knows nothing of runs.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayapp.errors import RunFolderError


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn a full disk into one message that says what is safe."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunFolderError(
            f"no space left to write {path}: {error.strerror}. The last whole checkpoint is intact; free some space "
            "and start the same command again to go on from it."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file's contents, all or nothing."""
    pending = path.with_name(f".{path.name}.pending")
    pending.write_text(text)
    fsync(pending)
    pending.replace(path)


def fsync(path: Path) -> None:
    """Have the disk hold what a file or folder contains now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
