"""A sandbox pool inside the calling process, for programs without Ray: `rayapp mcp serve` and benchmarks.

The same `LeasePool` and the same client as in a run; only the actor between them is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Fate, Lease
from rayapp.sandbox.pool.build import build_pool
from rayapp.sandbox.pool.client import PoolClient
from rayapp.sandbox.pool.pool import LeasePool
from rayapp.sandbox.providers.table import local_provider, remote_providers

_TEND_EVERY_S = 5.0


@asynccontextmanager
async def open_pool(config: SandboxConfig, name: str) -> AsyncIterator[tuple[PoolClient, LeasePool]]:
    """A pool of this configuration and a way to its sandboxes; everything is ended on the way out.

    Args:
        name: put into the labels of remote sandboxes, as a run's name is.
    Raises:
        SandboxConfigError: a provider's package or key is not there.
    """
    pool = build_pool(config, name)
    client = PoolClient(
        PoolHere(pool),
        local_provider(config),
        remote=remote_providers(config),
        holder=name,
        ttl_s=config.lease_ttl_s,
        create_timeout_s=config.create_timeout_s,
    )
    tending = asyncio.create_task(_tend(pool, config), name=f"tend sandboxes of {name}")
    try:
        yield client, pool
    finally:
        tending.cancel()
        await asyncio.shield(_close(client, pool))


async def _close(client: PoolClient, pool: LeasePool) -> None:
    try:
        await client.close()
    finally:
        await pool.close()


async def _tend(pool: LeasePool, config: SandboxConfig) -> None:
    num_rounds = 0
    sweep_every = max(1, round(config.sweep_every_s / _TEND_EVERY_S))
    while True:
        await asyncio.sleep(_TEND_EVERY_S)
        pool.tend()
        num_rounds += 1
        if num_rounds % sweep_every == 0:
            await asyncio.gather(*(source.keeper.sweep() for source in pool.sources if source.keeper is not None))


class PoolHere:
    """See `rayapp.sandbox.pool.client.Pool`."""

    def __init__(self, pool: LeasePool) -> None:
        self._pool = pool

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int) -> Lease:
        return await self._pool.acquire(holder, spec, timeout_s=timeout_s, lease_id=lease_id)

    async def release(self, lease_id: int, fate: Fate) -> None:
        self._pool.release(lease_id, fate)

    async def heartbeat(self, holder: str) -> None:
        self._pool.heartbeat(holder)
