"""Plain data types that the pool and its callers exchange through Ray. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import SandboxSpec

RUN_LABEL = "rayapp-run"  # The pool's sweeps and `rayapp sandbox reap` select by it.
APP_LABEL, APP_NAME = "rayapp-app", "rayapp"  # of every remote sandbox, in any run
# A run that starts ends the sandboxes that earlier attempts of the run left, but only those of its own host.
HOST_LABEL = "rayapp-host"

ANSWER_WITHIN_S = 20.0  # of a call to a remote sandbox, besides the code's own time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Data with which a worker connects to one remote sandbox without calling the provider's API."""

    sandbox_id: str
    endpoint: str = ""  # a URL or a domain, in the provider's own form
    token: str = field(default="", repr=False)
    traffic_token: str = field(default="", repr=False)  # of the proxy in front of the sandbox; only E2B has one
    version: str = ""  # of the provider's agent in the sandbox, for clients that depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Permission to use one sandbox."""

    lease_id: int
    holder: str
    expires_at: float  # on the pool's clock, in seconds
    provider: str = "local"
    connection: Connection | None = None  # None if the holder makes the sandbox itself (`local`)


class ConnectedSandbox(Sandbox, Protocol):
    @property
    def connection(self) -> Connection: ...


class RemoteProvider(SandboxProvider, Protocol):
    """Provider of sandboxes outside this machine. The pool creates the sandboxes; the rollout workers use them."""

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> ConnectedSandbox: ...

    def attach(self, connection: Connection, spec: SandboxSpec) -> Sandbox:
        """Return a sandbox that another process created. Nothing is sent: if it is gone, its first use fails."""
        ...
