"""Writing files so that a crash leaves the old ones or the new ones, and saying what is safe when the disk is full.

Used by whatever writes into a run folder. Knows nothing of runs.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rayapp.errors import RunFolderError, StorageFullError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNWRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_PENDING = ".pending-"


@contextmanager
def explain_full_disk(path: Path, safe: Callable[[], str] = str) -> Iterator[None]:
    """Turn a full disk into one message.

    Args:
        safe: asked when it is full; a sentence that says from where the next start goes on.
    Raises:
        StorageFullError: the disk or the quota is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFullError(
            f"no space left to write {error.filename or path}: {error.strerror or error}. {safe()} Free some space and "
            "start the same command again.".replace(".  ", ". ")
        ) from error


@contextmanager
def explain_unwritable(path: Path) -> Iterator[None]:
    """Turn a folder that this user may not write into one message.

    Raises:
        RunFolderError: it belongs to somebody else, or lies on a disk that is mounted read-only.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE and not isinstance(error, (FileExistsError, NotADirectoryError)):
            raise
        raise RunFolderError(
            f"{error.filename or path} can't be written: {error.strerror or error}. Choose a folder that this user may "
            "write (run.output_dir; with s3:// run.staging_dir)."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file's contents, all or nothing."""
    with replacing(path) as pending:
        pending.write_text(text)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to: it becomes `path`, on disk, if the block succeeds, and goes if it fails."""
    # A name of its own: two threads may replace the same file. The ending stays, since some writers choose by it.
    pending = path.with_name(f"{_PENDING}{secrets.token_hex(4)}-{path.name}")
    try:
        yield pending
        fsync(pending)
        pending.replace(path)
        fsync(path.parent)  # without it a crash of the machine can take the rename back
    finally:
        pending.unlink(missing_ok=True)


def remove_pending(folder: Path) -> None:
    """Delete what writers that were killed have left in a folder; nobody else may be writing there.

    Names of before `replacing` are among it: `.metrics.jsonl.pending`.
    """
    for path in (*folder.glob(f"{_PENDING}*"), *folder.glob(".*.pending*")):
        if path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Delete a folder, also while others may be adding to it or deleting it: what they add at that moment may stay."""
    shutil.rmtree(folder, ignore_errors=True)


def fsync_tree(folder: Path) -> None:
    """Have the disk hold every file and folder below, and the folder itself."""
    for path in (*folder.rglob("*"), folder):
        fsync(path)


def fsync(path: Path) -> None:
    """Have the disk hold what a file or folder contains now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
