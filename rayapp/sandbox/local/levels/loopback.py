"""The loopback of a sandbox's own network namespace: one address, one port, where the provider's process listens.

A socket belongs to the namespace in which it was made, whichever process holds it. So the zygote makes the listening
socket inside its namespace and passes it out over its channel; the provider accepts connections of the sandbox's
programs there. The namespace holds nothing else, and no address of the machine leads into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

PORT = 8000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_INTERFACE = struct.Struct("16sH22x")
_BACKLOG = 16
_RECEIVE_BYTES = 1 << 17
"""Receive buffer: kernel memory for each connection, which no limit of the sandbox counts; a fixed size does not
grow."""
_SEND_BUFFERS = Path("/proc/sys/net/ipv4/tcp_wmem"), "4096 16384 262144"
"""Send buffer of a connection in this network namespace: least, initial and most bytes. Linux's most is 4 MiB."""


def bring_up(sock: socket.socket) -> None:
    """Bring up the loopback of this socket's network namespace. Raises OSError without rights over it."""
    _, flags = _INTERFACE.unpack(fcntl.ioctl(sock, _SIOCGIFFLAGS, _INTERFACE.pack(b"lo", 0)))
    fcntl.ioctl(sock, _SIOCSIFFLAGS, _INTERFACE.pack(b"lo", flags | _IFF_UP))


def listen() -> socket.socket:
    """Bring up the loopback and listen there. Needs a new network namespace, and rights over it.

    Raises:
        OSError: this node refuses a step.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bring_up(listening)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        with contextlib.suppress(OSError):  # where /proc/sys is read-only, each connection may hold Linux's most
            _SEND_BUFFERS[0].write_text(_SEND_BUFFERS[1])
        listening.bind(("127.0.0.1", PORT))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"loopback: {error.strerror}") from error
    return listening
