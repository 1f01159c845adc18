"""The program of the text process (`text_process.py`): runs one call after the other, each with a limit of CPU time.

A call arrives as a pickle; its result is sent back as JSON, which can't contain code. Only the standard library,
markdown-it and modules that need nothing else are imported.
"""

from __future__ import annotations

import json
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

_LENGTH = struct.Struct("!I")
_MEMORY_BYTES = 1 << 30  # of address space; `ast.parse` of a hostile text may exceed it, and then raises MemoryError


def write_call(stream: BufferedRWPair, call: tuple[Any, ...]) -> None:
    """Write a call: (function, arguments, seconds of CPU time)."""
    _write(stream, pickle.dumps(call))


def write_frame(stream: BufferedRWPair, value: object) -> None:
    _write(stream, json.dumps(value).encode())


def _write(stream: BufferedRWPair, data: bytes) -> None:
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BufferedRWPair) -> Any:
    """Read the next value. EOFError: the other process has ended."""
    return json.loads(_read(stream))


def _read(stream: BufferedRWPair) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return _exactly(stream, length)


def _exactly(stream: BufferedRWPair, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


def main() -> None:
    """Read calls from the socket at standard input, run them, and write the results to the same socket."""
    # Ignore Ctrl-C, whose signal goes to every process of the terminal: the parent ends this process by closing its
    # socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for kind, limit in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit, hard) if hard == resource.RLIM_INFINITY else (min(limit, hard), hard))
    with socket.socket(fileno=0) as ends, ends.makefile("rwb") as stream:
        write_frame(stream, "ready")
        while True:
            try:
                call = _read(stream)
            except EOFError:
                return
            write_frame(stream, _answer(call))


def _answer(call: bytes) -> tuple[str, object]:
    try:
        function, arguments, cpu_s = pickle.loads(call)  # the parent wrote it: plain data and functions of rayapp
        # Set no signal handler: the kernel then ends this process when the time is up, whatever the interpreter is
        # doing.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        return "returned", function(*arguments)
    except Exception as error:  # boundary: the function may raise anything; the parent handles it
        return "raised", f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def is_held(condition: Callable[[Any], object], values: object) -> bool:
    try:
        return bool(condition(values))
    except Exception:  # boundary: the values may not support the comparison, e.g. abs("x")
        return False


if __name__ == "__main__":
    main()
