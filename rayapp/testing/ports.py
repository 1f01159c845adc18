"""Ports for servers that tests start. Used by tests only."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of this machine that nobody listens on. Another program may take it: ask right before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
