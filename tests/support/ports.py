"""Ports for servers that tests start. Used by tests only."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

_FIRST, _LAST = 20_000, 32_000
"""Above the ports that Ray gives its workers, and below those that Linux gives to outgoing connections: no other
program takes a port of this range between search and use, unless another test finds the same one."""


def free_port() -> int:
    """Return a port of this machine on which no program listens."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", SystemRandom().randint(_FIRST, _LAST)))
            return int(probe.getsockname()[1])
