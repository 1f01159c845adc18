"""Plain data that the pool and its callers exchange through Ray. No behaviour, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import SandboxSpec

RUN_LABEL = "rayapp-run"
"""Label of every remote sandbox: the run's name. The sweeps and `rayapp sandbox reap` select by it."""
APP_LABEL, APP_NAME = "rayapp-app", "rayapp"
"""Label of every sandbox of this application, whatever the run."""
HOST_LABEL = "rayapp-host"
"""Label: host of the pool. At its start a run sweeps only sandboxes that an earlier attempt left on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Data with which a worker reaches one remote sandbox, without asking the provider again."""

    sandbox_id: str
    endpoint: str = ""
    """A URL or a domain, in the provider's own form."""
    token: str = field(default="", repr=False)
    """Secret of this sandbox; empty if the provider has none."""
    traffic_token: str = field(default="", repr=False)
    """Second secret, of the proxy in front of the sandbox; E2B only."""
    version: str = ""
    """Version of the agent in the sandbox, for providers whose client has to know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to use one sandbox."""

    lease_id: int
    holder: str
    """Name of the caller, for the statistics and to reclaim the leases of a dead caller."""
    expires_at: float
    """Time on the pool's clock, in seconds."""
    provider: str = "local"
    connection: Connection | None = None
    """None if the holder makes the sandbox in its own process (`local`): the lease is only a place then."""
    fallback_from: tuple[str, ...] = ()
    """Providers that come first in the configuration and could not serve."""


class Fate(StrEnum):
    """State of a sandbox when its lease ends."""

    CLEAN = "clean"
    """The sandbox answered every call, and nothing in it was stopped or left: it may serve again after a check."""
    DIRTY = "dirty"
    GONE = "gone"
    UNBORN = "unborn"
    """The holder had a place but could not make the sandbox."""


class ConnectedSandbox(Sandbox, Protocol):
    """A sandbox that other processes can use as well."""

    @property
    def connection(self) -> Connection: ...


class RemoteProvider(SandboxProvider, Protocol):
    """Makes sandboxes outside this machine: created by the pool, used by the workers."""

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> ConnectedSandbox: ...

    def attach(self, connection: Connection, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that another process created. Makes no call: one that is gone fails at first use."""
        ...
