"""The loopback of a sandbox, where programs in it reach what this process serves, and nothing else of the outside.

    program in the sandbox -- TCP to 127.0.0.1:port --> accept(): a socket of this process

Local sandboxes hand out a socket that was made inside; remote ones have a relay (`providers/relay.py`).
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
"""Waits for the next connection, of a hostile program maybe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loopback:
    """See the module."""

    port: int
    """Of 127.0.0.1 in the sandbox."""
    folder: Path
    """In the sandbox, where such a program may write."""
    accept: Accept


def loopback_of(sandbox: Sandbox) -> AbstractAsyncContextManager[Loopback]:
    """A sandbox's loopback, for the length of a block.

    Raises:
        SandboxConfigError: this provider's sandboxes have none.
    """
    own: Callable[[], AbstractAsyncContextManager[Loopback]] | None = getattr(sandbox, "loopback", None)
    if own is None:
        raise SandboxConfigError(
            f"agent.external.inside: sandboxes of {sandbox.provider} have no way to the policy; those of local, e2b "
            "and daytona have"
        )
    return own()
