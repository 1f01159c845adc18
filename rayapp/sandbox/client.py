"""A rollout worker's way to sandboxes: permission from the pool, the sandbox itself in this very process.

Local sandboxes are processes of the worker's node, so the worker owns them; the pool only says how many run at once.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from rayapp.protocols import Sandbox, SandboxProvider
from rayapp.sandbox.pool import Lease
from rayapp.types import SandboxSpec


class Pool(Protocol):
    """The sandbox-pool actor, or a `LeasePool` in tests."""

    async def acquire(self, holder: str, *, timeout_s: float) -> Lease: ...

    async def release(self, lease_id: int) -> None: ...


class PoolClient:
    """See `rayapp.protocols.SandboxSource`.

    Args:
        pool: grants leases.
        provider: makes the sandboxes; closed with this client.
        holder: this caller's name in the pool.
        ttl_s: the provider ends a sandbox after this long, should nobody else.
    """

    def __init__(self, pool: Pool, provider: SandboxProvider, *, holder: str, ttl_s: float) -> None:
        self._pool = pool
        self._provider = provider
        self._holder = holder
        self._ttl_s = ttl_s

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> PoolLease:
        """A sandbox for the length of an `async with` block."""
        return PoolLease(self, spec, timeout_s)

    async def acquire(self, spec: SandboxSpec, timeout_s: float) -> tuple[Lease, Sandbox]:
        """A lease and its sandbox; neither, if the sandbox can't be made."""
        lease = await self._pool.acquire(self._holder, timeout_s=timeout_s)
        try:
            sandbox = await self._provider.create(
                spec, labels={"holder": self._holder}, ttl_s=self._ttl_s, timeout_s=timeout_s
            )
        except BaseException:
            await asyncio.shield(self._pool.release(lease.lease_id))
            raise
        return lease, sandbox

    async def release(self, lease: Lease, sandbox: Sandbox) -> None:
        """End the sandbox, then give the lease back: the other order would let one too many run."""
        try:
            await sandbox.kill()
        finally:
            await self._pool.release(lease.lease_id)

    async def close(self) -> None:
        """End every sandbox of this worker. Idempotent."""
        await self._provider.close()


class PoolLease:
    """See `rayapp.protocols.SandboxLease`."""

    def __init__(self, client: PoolClient, spec: SandboxSpec, timeout_s: float) -> None:
        self._client = client
        self._spec = spec
        self._timeout_s = timeout_s
        self._held: tuple[Lease, Sandbox] | None = None

    async def __aenter__(self) -> Sandbox:
        self._held = await self._client.acquire(self._spec, self._timeout_s)
        return self._held[1]

    async def __aexit__(self, *exc: object) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            # Shielded: a cancelled trajectory must not leave its sandbox behind.
            await asyncio.shield(self._client.release(*held))
