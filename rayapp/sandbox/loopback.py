"""The loopback of a sandbox: programs in the sandbox reach one service of this process, and nothing else outside.

    program in the sandbox -- TCP to 127.0.0.1:port --> accept(): a socket of this process

Local sandboxes pass on a listening socket made inside; remote sandboxes run a relay (`providers/relay.py`).
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.errors import SandboxConfigError
from rayapp.core.protocols import Sandbox

Accept = Callable[[], Awaitable[socket.socket]]
"""Waits for the next connection. The program that connects may be hostile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loopback:
    """Address in the sandbox, and the way to accept connections to it."""

    port: int
    """Port of 127.0.0.1 in the sandbox."""
    folder: Path
    """Folder in the sandbox in which the connecting program may write."""
    accept: Accept


def loopback_of(sandbox: Sandbox) -> AbstractAsyncContextManager[Loopback]:
    """Open a sandbox's loopback for the length of a block.

    Raises:
        SandboxConfigError: sandboxes of this provider have no loopback.
    """
    own: Callable[[], AbstractAsyncContextManager[Loopback]] | None = getattr(sandbox, "loopback", None)
    if own is None:
        raise SandboxConfigError(
            f"agent.external.inside: sandboxes of {sandbox.provider} have no way to the policy; use local, e2b "
            "or daytona"
        )
    return own()
