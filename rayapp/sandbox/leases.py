"""What the pool and its callers tell each other: plain data that crosses Ray. No behaviour, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import SandboxSpec

RUN_LABEL = "rayapp-run"
"""Label of every remote sandbox: the run's name. What the sweeps and `rayapp sandbox reap` look for."""
APP_LABEL, APP_NAME = "rayapp-app", "rayapp"
"""Label of everything we make, whatever the run."""
HOST_LABEL = "rayapp-host"
"""Label: host of the pool. A run sweeps at its start only what the same run left on the same host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How a worker reaches one remote sandbox, without asking the provider again."""

    sandbox_id: str
    endpoint: str = ""
    """Provider's own: a URL or a domain."""
    token: str = field(default="", repr=False)
    """Secret of this one sandbox; empty where the provider has none."""
    traffic_token: str = field(default="", repr=False)
    """Second secret, of the proxy in front of it; E2B only."""
    version: str = ""
    """Of the agent in the sandbox, where the client has to know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to use one sandbox."""

    lease_id: int
    holder: str
    """Who asked, for the statistics and to reclaim what a dead caller held."""
    expires_at: float
    """On the pool's clock, in seconds."""
    provider: str = "local"
    connection: Connection | None = None
    """None where the holder makes the sandbox in its own process (`local`): then the lease is a place, no more."""
    fallback_from: tuple[str, ...] = ()
    """Providers that should have served first and could not."""


class Fate(StrEnum):
    """What became of a sandbox while it was leased."""

    CLEAN = "clean"
    """It answered every call, and nothing in it was stopped or kept: it may serve again, after a check."""
    DIRTY = "dirty"
    GONE = "gone"
    UNBORN = "unborn"
    """The holder had a place, and could not make the sandbox."""


class ConnectedSandbox(Sandbox, Protocol):
    """A sandbox that another process can use as well."""

    @property
    def connection(self) -> Connection: ...


class RemoteProvider(SandboxProvider, Protocol):
    """Makes sandboxes outside this machine: created by the pool, used by the workers."""

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> ConnectedSandbox: ...

    def attach(self, connection: Connection, spec: SandboxSpec) -> Sandbox:
        """A sandbox that another process created. No call is made: one that is gone says so when used."""
        ...
