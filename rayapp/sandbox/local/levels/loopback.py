"""The loopback of a sandbox's own network namespace: one address and port, on which the provider's process listens.

A socket belongs to the namespace in which it was made, whichever process holds it. So the zygote makes a listening
socket inside its namespace and passes it to the provider. Programs outside can't connect into the namespace.
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
# A fixed size: the kernel would enlarge the buffer, whose memory no limit of the sandbox counts.
_RECEIVE_BYTES = 1 << 17
# Minimum, initial and maximum bytes; Linux's default maximum is 4 MiB.
_SEND_BUFFERS = Path("/proc/sys/net/ipv4/tcp_wmem"), "4096 16384 262144"


def bring_up(sock: socket.socket) -> None:
    _, flags = _INTERFACE.unpack(fcntl.ioctl(sock, _SIOCGIFFLAGS, _INTERFACE.pack(b"lo", 0)))
    fcntl.ioctl(sock, _SIOCSIFFLAGS, _INTERFACE.pack(b"lo", flags | _IFF_UP))


def listen() -> socket.socket:
    """Return a socket that listens on the loopback of a new network namespace, which the caller must own."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bring_up(listening)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        with contextlib.suppress(OSError):  # if /proc/sys is read-only, Linux's default maximum applies
            _SEND_BUFFERS[0].write_text(_SEND_BUFFERS[1])
        listening.bind(("127.0.0.1", PORT))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"loopback: can't listen on 127.0.0.1:{PORT}: {error.strerror}") from error
    return listening
