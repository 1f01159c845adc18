"""Files that appear whole or not at all, and what the operating system says about them as our errors."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayapp.errors import (
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
)

_ASIDE = ".tmp-"


def is_aside(name: str) -> bool:
    """True for the names under which files are written before they are whole."""
    return name.startswith(_ASIDE)


@contextmanager
def aside(path: Path, *, if_absent: bool = False) -> Iterator[Path]:
    """A path beside `path` to write to; it becomes `path` if the block succeeds and is removed if not.

    Raises:
        StorageExistsError: `if_absent`, and `path` is there at the end of the block.
        StorageError: the operating system refused something.
    """
    temporary = path.with_name(f"{_ASIDE}{secrets.token_hex(6)}-{path.name[-100:]}")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            # A link fails where the name is taken, atomically; a rename would replace it.
            (os.link if if_absent else os.replace)(temporary, path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


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


def _sync_folder(folder: Path) -> None:
    # Without this a crash of the machine can take back the rename though the data is on disk.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
