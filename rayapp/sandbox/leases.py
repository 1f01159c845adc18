"""Plain data types that the pool and its callers exchange through Ray. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import SandboxSpec

RUN_LABEL = "rayapp-run"
"""Label of every remote sandbox with the run's name. Sweeps and `rayapp sandbox reap` select sandboxes by this
label."""
APP_LABEL, APP_NAME = "rayapp-app", "rayapp"
"""Label of every remote sandbox that rayapp makes, whatever the run."""
HOST_LABEL = "rayapp-host"
"""Label with the host of the pool. At its start, a run ends only sandboxes that an earlier attempt on this host
left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Data with which a worker connects to one remote sandbox, without a call to the provider's API."""

    sandbox_id: str
    endpoint: str = ""
    """Address of the sandbox: a URL or a domain, in the provider's own form."""
    token: str = field(default="", repr=False)
    """Secret of this sandbox; empty if the provider has none."""
    traffic_token: str = field(default="", repr=False)
    """Second secret, of the proxy in front of the sandbox; E2B only."""
    version: str = ""
    """Version of the provider's agent in the sandbox, for clients that depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to use one sandbox."""

    lease_id: int
    holder: str
    """Name of the caller, for the statistics and to reclaim the leases of a dead caller."""
    expires_at: float
    """Time at which the lease expires, in seconds on the pool's clock."""
    provider: str = "local"
    connection: Connection | None = None
    """Connection to the sandbox. None if the holder makes the sandbox in its own process (`local`): then the lease only
    limits the number of such sandboxes."""
    fallback_from: tuple[str, ...] = ()
    """Providers that come earlier in the configuration but were not available."""


class Fate(StrEnum):
    """State of a sandbox when its lease ends."""

    CLEAN = "clean"
    """The sandbox answered every call, and no code in it was stopped: after a check it may be leased again."""
    DIRTY = "dirty"
    GONE = "gone"
    UNBORN = "unborn"
    """The holder had a lease but could not make the local sandbox."""


class ConnectedSandbox(Sandbox, Protocol):
    """A sandbox that other processes can connect to."""

    @property
    def connection(self) -> Connection: ...


class RemoteProvider(SandboxProvider, Protocol):
    """Makes sandboxes outside this machine. The pool creates them; the workers use them."""

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> ConnectedSandbox: ...

    def attach(self, connection: Connection, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that another process created. This makes no call: if the sandbox is gone, its first use
        fails.
        """
        ...
