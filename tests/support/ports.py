"""Ports for servers that tests start. Used by tests only."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

_FIRST, _LAST = 20_000, 32_000
"""Above those that Ray gives its workers, and below those from which Linux takes one for each connection: of these
nobody has one between the moment it is found and the moment it is used, unless two happen to find the same."""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", SystemRandom().randint(_FIRST, _LAST)))
            return int(probe.getsockname()[1])
