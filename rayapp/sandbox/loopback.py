"""The loopback of a sandbox: programs in it can connect to one service of this process, and to no other address.

The zygote of a local sandbox makes the listening socket inside and passes it out. Remote sandboxes have none.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.errors import SandboxConfigError
from rayapp.core.protocols import Sandbox

Accept = Callable[[], Awaitable[socket.socket]]  # waits for the next connection, whose program may be hostile


@dataclass(frozen=True, slots=True, kw_only=True)
class Loopback:
    """Port in the sandbox, and a function that accepts connections to it."""

    port: int  # of 127.0.0.1 inside the sandbox
    folder: Path  # in the sandbox, in which the connecting program may write
    accept: Accept


def loopback_of(sandbox: Sandbox) -> AbstractAsyncContextManager[Loopback]:
    """Return a context manager that opens a sandbox's loopback."""
    own: Callable[[], AbstractAsyncContextManager[Loopback]] | None = getattr(sandbox, "loopback", None)
    if own is None:
        raise SandboxConfigError(
            f"agent.external.inside: programs in sandboxes of {sandbox.provider} can't reach the policy. Use "
            "local in sandbox.providers"
        )
    return own()
