"""The loopback of a sandbox's own network namespace: one address, one port, where the provider's process listens.

A socket belongs to the namespace that it was made in, whoever holds it. So the zygote, once in its namespace, makes the
listening one and hands it out over its channel; the provider accepts there what the sandbox's programs connect. Nothing
else is in that namespace, and no address of the machine's leads into it.
"""

from __future__ import annotations

import fcntl
import socket
import struct

PORT = 8000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_INTERFACE = struct.Struct("16sH22x")
_BACKLOG = 16
_RECEIVE_BYTES = 1 << 17
"""Of the kernel's memory for each connection, which no limit of the sandbox counts: with a size of its own it does not
grow."""


def listen() -> socket.socket:
    """Bring the loopback up and listen there. In a new network namespace, with rights over it.

    Raises:
        OSError: this node refuses a step.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _, flags = _INTERFACE.unpack(fcntl.ioctl(listening, _SIOCGIFFLAGS, _INTERFACE.pack(b"lo", 0)))
        fcntl.ioctl(listening, _SIOCSIFFLAGS, _INTERFACE.pack(b"lo", flags | _IFF_UP))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        listening.bind(("127.0.0.1", PORT))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"loopback: {error.strerror}") from error
    return listening
