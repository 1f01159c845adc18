"""Files that appear whole or not at all, locks, and what the operating system says about them as our errors.

aside, write_text, put_in_place          whole or not at all; errors are OSErrors
explain_full_disk, explain_unwritable    an OSError in a run folder, as one message with the way out
storage_errors, stored                   the same for storage: an OSError as a StorageError
locked                                   one process at a time
json_lines                               what users write: a JSON value a line
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayapp.core.errors import (
    InputError,
    RunFolderError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNWRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ASIDE = ".tmp-"


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
    with aside(path) as temporary:
        temporary.write_text(text)


@contextmanager
def aside(path: Path, *, if_absent: bool = False) -> Iterator[Path]:
    """A name beside `path` to write to: it becomes `path`, on disk, if the block succeeds, and goes if it fails.

    Raises:
        FileExistsError: `if_absent`, and `path` is there at the end of the block.
    """
    # Unique, since two threads may replace the same file; ends as `path` does, since some writers choose by the ending.
    temporary = path.with_name(f"{_ASIDE}{secrets.token_hex(6)}-{path.name[-100:]}")
    try:
        yield temporary
        fsync(temporary)
        # A link fails where the name is taken, atomically; a rename would replace it.
        (os.link if if_absent else os.replace)(temporary, path)
        fsync(path.parent)  # without it a crash of the machine can take the rename back
    finally:
        temporary.unlink(missing_ok=True)


def is_aside(name: str) -> bool:
    """True for the names under which files are written before they are whole."""
    return name.startswith(_ASIDE)


def put_in_place(pending: Path, target: Path) -> None:
    """Make a folder that was written aside `target`, on disk. What is at `target` now is deleted."""
    for path in (*pending.rglob("*"), pending):
        fsync(path)
    remove_tree(target)
    pending.rename(target)
    fsync(target.parent)


def remove_pending(folder: Path) -> None:
    """Delete what writers that were killed have left in a folder; nobody else may be writing there.

    Checkpoints are `.pending-*`. Files of older versions are too, or `.metrics.jsonl.pending`.
    """
    for path in (*folder.glob(f"{_ASIDE}*"), *folder.glob(".pending-*"), *folder.glob(".*.pending*")):
        if path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Delete a folder, also while others may be adding to it or deleting it: what they add at that moment may stay."""
    shutil.rmtree(folder, ignore_errors=True)


def fsync(path: Path) -> None:
    """Have the disk hold what a file or folder contains now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def stored(path: Path, *, if_absent: bool = False) -> Iterator[Path]:
    """As `aside`; makes the folders above `path`.

    Raises:
        StorageExistsError: `if_absent`, and `path` is there at the end of the block.
        StorageError: the operating system refused something.
    """
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path, if_absent=if_absent) as temporary:
            yield temporary


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into one of ours."""
    try:
        yield
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: Path) -> StorageError:
    text = f"{path}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return StorageNotFoundError(text)
    if isinstance(error, FileExistsError):
        return StorageExistsError(f"{path} exists already: another writer was first")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StoragePermissionError(f"{text}. Choose a folder that this user may write.")
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageFullError(f"{text}. Make room there, or choose another disk.")
    return StorageError(text)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file for the length of the block; it dies with its process.

    Raises:
        RunFolderError: another process holds it.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise RunFolderError(
                f"{path.parent} is in use by the run with process id {holder}. Wait for it, stop it, or choose another "
                "run.name."
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def json_lines(lines: Iterable[str], file: str) -> Iterator[tuple[int, Any]]:
    """Values with the number of their line, from 1 on; empty lines are left out.

    Args:
        lines: a file, or `text.split("\\n")`; not `splitlines`, which also breaks at U+2028 inside of a text.
        file: for messages.
    Raises:
        InputError: a line is no JSON.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file}, line {number} is no JSON: {error}") from None
        yield number, value
