"""Reads and writes a sandbox's files from the inside, confined like the candidate, so that its symbolic links lead
nowhere.

Called by the child process for `read_file` and `write_file`.
"""

# Runs in each child, where every function first used costs pages, hence os and not pathlib.
# ruff: noqa: PTH103, PTH120, PTH123
from __future__ import annotations

import os
from collections.abc import Callable

from rayapp.sandbox.verdict import harness

KINDS = ("write", "read")


def run(path: str, given: bytes | int, emit: Callable[[bytes], None]) -> int:
    """Read or write one file, and send one frame: done, or why not. A file's content goes to standard output.

    Args:
        given: the bytes to write, or the number of bytes to read at most.
    """
    try:
        if isinstance(given, bytes):
            _write(path, given)
        else:
            _read(path, given)
    except OSError as error:
        emit(harness.frame("failed", f"{type(error).__name__}: {error.strerror}: {path}", 1))
        return 1
    emit(harness.frame("exited", 0))
    return 0


def _write(path: str, data: bytes) -> None:
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)


def _read(path: str, max_bytes: int) -> None:
    # Open without blocking: the candidate may have put a pipe there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while max_bytes > 0 and (data := os.read(descriptor, min(max_bytes, 1 << 16))):
            max_bytes -= len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(1, view) :]
    finally:
        os.close(descriptor)
