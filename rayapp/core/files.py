"""Atomic file writes, locks, conversion of OSErrors to errors of rayapp, and storage locations."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.core.errors import (
    InputError,
    RunFolderError,
    StorageConfigError,
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
    """Turn the OSError of a full disk into a StorageFullError with a way out; `safe` says what is saved."""
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
    """Turn the OSError of a folder that this user may not write to into a RunFolderError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE and not isinstance(error, (FileExistsError, NotADirectoryError)):
            raise
        raise RunFolderError(
            f"{error.filename or path} can't be written: {error.strerror or error}. Choose a folder that this user may "
            "write: run.output_dir, or run.staging_dir for a run on s3://."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file's contents completely, or leave them unchanged."""
    with aside(path) as temporary:
        temporary.write_text(text)


@contextmanager
def aside(path: Path, *, if_absent: bool = False) -> Iterator[Path]:
    """Yield a temporary file that becomes `path`, synced to disk, if the block succeeds. FileExistsError: `if_absent`,
    and `path` exists at the end of the block."""
    # Make the name unique, because two threads may replace the same file, and keep the suffix of `path`, from which
    # some writers choose a format.
    temporary = path.with_name(f"{_ASIDE}{secrets.token_hex(6)}-{path.name[-100:]}")
    try:
        yield temporary
        fsync(temporary)
        # A link fails atomically if the name is taken; a rename would replace the file.
        (os.link if if_absent else os.replace)(temporary, path)
        fsync(path.parent)  # otherwise the rename could be lost if the machine crashes
    finally:
        temporary.unlink(missing_ok=True)


def readable_as_its_folder(file: Path) -> None:
    """Give a file its folder's permissions, because safetensors writes files that only their owner can read."""
    file.chmod(file.parent.stat().st_mode & 0o666)


def is_aside(name: str) -> bool:
    """True for the name of a temporary file, which may be incomplete."""
    return name.startswith(_ASIDE)


def put_in_place(pending: Path, target: Path) -> None:
    """Rename a completely written folder to `target` and sync it to disk. A folder at `target` is deleted first."""
    for path in (*pending.rglob("*"), pending):
        fsync(path)
    remove_tree(target)
    pending.rename(target)
    fsync(target.parent)


def remove_pending(folder: Path) -> None:
    """Delete the temporary files that killed writers left in a folder. No other process may be writing there.
    Incomplete checkpoints are `.pending-*`; older versions also left `.metrics.jsonl.pending`."""
    for path in (*folder.glob(f"{_ASIDE}*"), *folder.glob(".pending-*"), *folder.glob(".*.pending*")):
        if path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)


def remove_tree(folder: Path) -> None:
    """Delete a folder, even while other processes add files to it (which may remain) or delete it."""
    shutil.rmtree(folder, ignore_errors=True)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def stored(path: Path, *, if_absent: bool = False) -> Iterator[Path]:
    """Make the folders above `path`, then yield a temporary file as `aside` does. Errors are StorageErrors."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path, if_absent=if_absent) as temporary:
            yield temporary


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _translate(error, path) from error


def _translate(error: OSError, path: Path) -> StorageError:
    text = f"{path}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return StorageNotFoundError(text)
    if isinstance(error, FileExistsError):
        return StorageExistsError(f"{path} already exists: another writer was first")
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return StoragePermissionError(f"{text}. Choose a folder that this user may write.")
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StorageFullError(f"{text}. Make room there, or choose another disk.")
    return StorageError(text)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file for the length of the block, or of the process. RunFolderError: another process has it."""
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
    """Yield (line number from 1, value) of each line; empty lines are skipped.

    `lines` is a file, or `text.split("\\n")`; never `splitlines`, which also breaks a line at U+2028 inside a JSON
    string.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise InputError(f"{file}, line {number} is not JSON: {error}") from None
        yield number, value


# Bucket names that S3, OSS and MinIO all accept. A dot is legal but refused here: with virtual-hosted names it breaks
# TLS.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Location of a folder or object on a disk or in object storage.

    Example: `Location.parse("s3://models/run1")` is `Location(bucket="models", key="run1")`; on a disk `bucket` is
    empty.
    """

    key: str  # inside the bucket, without a slash at either end; without a bucket, a path on the disk
    bucket: str = ""

    @property
    def is_remote(self) -> bool:
        return bool(self.bucket)

    @classmethod
    def parse(cls, uri: str) -> Location:
        """Parse a URI or path."""
        scheme = _SCHEME.match(uri)
        if scheme is None or scheme.group(1).lower() == "file":
            path = uri[len("file://") :] if scheme else uri
            if not path:
                raise StorageConfigError("a storage location is empty; give a folder or s3://bucket/prefix")
            return cls(key=path)
        if scheme.group(1) != "s3":
            raise StorageConfigError(
                f"storage location {uri!r}: only s3://bucket/prefix and local paths are supported. For OSS and MinIO, "
                "write s3:// and set RAYAPP_S3_PRESET (docs/data.md)."
            )
        bucket, _, key = uri[len("s3://") :].partition("/")
        if not _BUCKET.fullmatch(bucket):
            raise StorageConfigError(
                f"storage location {uri!r}: {bucket!r} is not a bucket name. A bucket name has 3 to 63 lower-case "
                "letters, digits, dots and hyphens, and begins and ends with a letter or digit."
            )
        return cls(bucket=bucket, key=key.strip("/"))

    def join(self, key: str) -> Location:
        if self.is_remote:
            return Location(bucket=self.bucket, key=f"{self.key}/{key}".strip("/"))
        return Location(key=str(Path(self.key) / key))

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}" if self.is_remote else self.key


def check_key(key: str) -> str:
    """Return `key` if it is relative, without `..` or an empty part: else it would leave the folder, or name different
    objects on disk and on S3."""
    parts = key.split("/")
    if not key or "\\" in key or "\0" in key or any(part in {"", ".", ".."} for part in parts):
        raise StorageConfigError(
            f"storage key {key!r} is invalid: a key consists of names joined by single slashes. A name must not be . "
            "or .., and the key must not contain a backslash or a NUL character."
        )
    return key
