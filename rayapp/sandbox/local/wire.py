"""Messages between a provider and its zygotes: one packet with a JSON header, and memfds with the bytes.

Both ends are rayapp's own. Code, inputs and outputs travel in memfds, so that they never enter the memory of the
zygote, which later executions are forked from. Used by `slot.py` outside and by `zygote.py`; never by the process that
runs code.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator

MAX_HEADER_BYTES = 32768
_FIXED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
MAX_BODIES = 2
"""Maximum memfds in one message: the job and its standard input."""


def send(channel: socket.socket, header: dict[str, object], *bodies: int) -> None:
    """Send a header together with file descriptors.

    Raises:
        BrokenPipeError, ConnectionError: the other end is gone.
    """
    packet = json.dumps(header, separators=(",", ":")).encode()
    if len(packet) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(packet)} bytes; the limit is {MAX_HEADER_BYTES}")
    socket.send_fds(channel, [packet], bodies)


def receive(channel: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Receive the next header and its descriptors, which the caller closes.

    Raises:
        EOFError: the other end has closed.
        BlockingIOError: no message yet, on a non-blocking socket.
    """
    packet, descriptors, _, _ = socket.recv_fds(channel, MAX_HEADER_BYTES, MAX_BODIES)
    if not packet:
        raise EOFError("the other end has closed")
    header: dict[str, object] = json.loads(packet)
    return header, descriptors


def memory_file(data: bytes) -> int:
    """Make a sealed memfd with these bytes: code could use a writable one as memory that no limit counts."""
    descriptor = os.memfd_create("rayapp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write_all(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_memory_file(descriptor: int) -> bytes:
    """Return all bytes of a memfd, whatever its file offset is."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    data = os.pread(descriptor, size, 0) if size else b""
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), len(data))
        if not more:
            break
        data += more
    return data


def split_frames(raw: bytes) -> Iterator[bytes]:
    """Yield the payloads of the frames that `child.send` wrote; leave out a truncated or malformed end."""
    at = 0
    while at + 4 <= len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        if at + 4 + size > len(raw):
            return
        yield raw[at + 4 : at + 4 + size]
        at += 4 + size


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
