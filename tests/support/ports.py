"""Ports for servers that tests start. Used by tests only."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

_FIRST, _LAST = 20_000, 32_000
"""Range above the ports of Ray's workers and below those that Linux uses for outgoing connections, so that between
search and use only another test could take the port."""


def free_port() -> int:
    """Return a port of this machine on which no program listens."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", SystemRandom().randint(_FIRST, _LAST)))
            return int(probe.getsockname()[1])
