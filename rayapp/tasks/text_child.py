"""The program of the text process: makes one call after the other, each with a limit of CPU time.

Started by `text_process.py`, which says what for. It has the standard library and this package's modules that need no
more, no environment, and no standard output.
"""

from __future__ import annotations

import importlib
import json
import resource
import signal
import socket
import struct
from io import BufferedRWPair
from typing import Any

_LENGTH = struct.Struct("!I")
_MEMORY_BYTES = 1 << 30
"""Limit of address space. Past it there is a MemoryError, which `ast.parse` may well give for a hostile text."""


def write_frame(stream: BufferedRWPair, value: object) -> None:
    """Write one JSON value. Raises TypeError or ValueError for what JSON can't hold."""
    data = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BufferedRWPair) -> Any:
    """Read the next value. Raises EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return json.loads(_exactly(stream, length))


def _exactly(stream: BufferedRWPair, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


def main() -> None:
    """Serve calls that come through the socket on standard input; answers go back the same way."""
    # Ignore Ctrl-C, which goes to the whole terminal: the parent ends this process by closing its side.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for kind, limit in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit, hard) if hard == resource.RLIM_INFINITY else (min(limit, hard), hard))
    with socket.socket(fileno=0) as ends, ends.makefile("rwb") as stream:
        write_frame(stream, "ready")
        while True:
            try:
                call = read_frame(stream)
            except EOFError:
                return
            write_frame(stream, _answer(*call))


def _answer(module: str, name: str, arguments: list[Any], cpu_s: float) -> tuple[str, object]:
    function = getattr(importlib.import_module(module), name)
    # The kernel ends this process when the time is used up, whatever the interpreter is busy with: no Python handler.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return "returned", function(*arguments)
    except Exception as error:  # boundary: what a rule raises is for the caller to judge
        return "raised", f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
