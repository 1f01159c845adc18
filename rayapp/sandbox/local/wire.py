"""Messages between a provider (`slot.py`) and its zygotes (`zygote.py`): a packet with a JSON header, and memfds.

Code, inputs and outputs travel in memfds and so never enter the memory from which later executions are forked.
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
MAX_BODIES = 2  # the job, and its standard input


def send(channel: socket.socket, header: dict[str, object], *bodies: int) -> None:
    packet = json.dumps(header, separators=(",", ":")).encode()
    if len(packet) > MAX_HEADER_BYTES:
        raise ValueError(f"the header of a sandbox's message has {len(packet)} bytes; the limit is {MAX_HEADER_BYTES}")
    socket.send_fds(channel, [packet], bodies)


def receive(channel: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Receive the next header and its descriptors, which the caller closes. EOFError: the channel is closed."""
    packet, descriptors, _, _ = socket.recv_fds(channel, MAX_HEADER_BYTES, MAX_BODIES)
    if not packet:
        raise EOFError("the process at the other end has closed the channel")
    header: dict[str, object] = json.loads(packet)
    return header, descriptors


def memory_file(data: bytes) -> int:
    """Make a memfd with these bytes, sealed: code could use a writable one as memory that no limit counts."""
    descriptor = os.memfd_create("rayapp", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _write_all(descriptor, data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_memory_file(descriptor: int) -> bytes:
    """Return all bytes of a memfd; its offset does not change."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    data = os.pread(descriptor, size, 0) if size else b""
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), len(data))
        if not more:
            break
        data += more
    return data


def split_frames(raw: bytes) -> Iterator[bytes]:
    """Yield the payloads of the frames that `child.send` wrote; a truncated or malformed frame ends the iteration."""
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
