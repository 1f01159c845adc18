"""Plain data types that the pool and its callers exchange through Ray. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import SandboxSpec

RUN_LABEL = "rayapp-run"
"""Label of every remote sandbox whose value is the run's name. The pool's sweeps and `rayapp sandbox reap` select by
it."""
APP_LABEL, APP_NAME = "rayapp-app", "rayapp"
"""Label, and its value, of every remote sandbox that rayapp makes in any run."""
HOST_LABEL = "rayapp-host"
"""Label whose value is the pool's host. A run that starts ends the sandboxes that earlier attempts of the run left, but
only those of its own host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Data that a worker needs to connect to one remote sandbox without calling the provider's API."""

    sandbox_id: str
    endpoint: str = ""
    """Address of the sandbox: a URL or a domain, in the provider's own form."""
    token: str = field(default="", repr=False)
    """Secret of this sandbox; empty if the provider has none."""
    traffic_token: str = field(default="", repr=False)
    """Secret of the proxy in front of the sandbox; only E2B has one."""
    version: str = ""
    """Version of the provider's agent in the sandbox, for clients that depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to use one sandbox."""

    lease_id: int
    holder: str
    """Name of the caller that holds the lease. Statistics show it, and the leases of a dead caller are found by it."""
    expires_at: float
    """Time at which the lease expires, in seconds on the pool's clock."""
    provider: str = "local"
    connection: Connection | None = None
    """Connection to the sandbox. None if the holder itself makes the sandbox (`local`): the lease then only limits the
    number of sandboxes."""


class Fate(StrEnum):
    """State of a sandbox when its lease ends."""

    CLEAN = "clean"
    """The sandbox answered every call, and no code in it was stopped: after a check it may be leased again."""
    DIRTY = "dirty"
    GONE = "gone"


class ConnectedSandbox(Sandbox, Protocol):
    """A sandbox that other processes can connect to."""

    @property
    def connection(self) -> Connection: ...


class RemoteProvider(SandboxProvider, Protocol):
    """Provider of sandboxes outside this machine. The pool creates the sandboxes; the rollout workers use them."""

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> ConnectedSandbox: ...

    def attach(self, connection: Connection, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that another process created. Nothing is sent: if the sandbox is gone, its first use
        fails.
        """
        ...
