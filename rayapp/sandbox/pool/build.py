"""Builds a sandbox pool from the configuration: for the actor, and (`open_pool`) inside programs without Ray."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rayapp.config.sandbox import LocalConfig, McpConfig, SandboxConfig
from rayapp.core.http import TokenBucket
from rayapp.core.protocols import SandboxProvider
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import APP_LABEL, APP_NAME, HOST_LABEL, RUN_LABEL, Lease, RemoteProvider
from rayapp.sandbox.pool.client import PoolClient
from rayapp.sandbox.pool.pool import LeasePool
from rayapp.sandbox.pool.stock import Stock, StockRules
from rayapp.sandbox.pool.supply import Supply
from rayapp.sandbox.providers import local_provider, num_local_sandboxes, remote_provider, remote_providers


def labels_of(run_name: str) -> dict[str, str]:
    return {APP_LABEL: APP_NAME, RUN_LABEL: run_name, HOST_LABEL: socket.gethostname()[:63]}


def build_pool(
    config: SandboxConfig,
    run_name: str,
    *,
    provider: RemoteProvider | None = None,
    clock: Callable[[], float] = time.monotonic,
    **times: float,
) -> LeasePool:
    """Build the pool of a configuration; tests give their `provider` and other `times` of `StockRules`."""
    section = config.provider
    limit = num_local_sandboxes(config) if isinstance(section, LocalConfig) else section.max_sandboxes
    max_leases = config.max_leases or limit
    if isinstance(section, LocalConfig | McpConfig):  # the lease holders make these sandboxes
        max_leases = min(max_leases, limit)
    pool = LeasePool(
        max_leases=max_leases,
        ttl_s=config.lease_ttl_s,
        provider=section.type,
        min_ready=config.min_ready,
        clock=clock,
    )
    if isinstance(section, LocalConfig | McpConfig):
        return pool
    rate_per_s = section.creations_per_s
    bucket = TokenBucket(rate_per_s=rate_per_s, burst=max(1, int(_BURST_S * rate_per_s)), clock=clock)
    pool.stock = Stock(
        Supply(section.type, max_sandboxes=limit, clock=clock, bucket=bucket),
        provider or remote_provider(section),
        StockRules(min_ready=config.min_ready, max_uses=config.max_uses, **times),
        labels=labels_of(run_name),
        clock=clock,
        on_change=pool.pump,
        on_config_error=pool.refuse,
    )
    return pool


_BURST_S = 5.0  # seconds whose creations may come at once after a pause; services allow such bursts
TEND_EVERY_S = 5.0
# Seconds between comparisons of the provider's list of sandboxes with the pool's; unknown sandboxes are ended.
_SWEEP_EVERY_S = 60.0


@asynccontextmanager
async def open_pool(
    config: SandboxConfig, name: str, *, local: SandboxProvider | None = None
) -> AsyncIterator[tuple[PoolClient, LeasePool]]:
    """Open a pool and yield a client of it; at the end of the block, end every sandbox. `name`, the run label, must be
    unique: a pool ends earlier sandboxes with the same label."""
    pool = build_pool(config, name)
    client = PoolClient(
        PoolHere(pool),
        local or local_provider(config),
        remote=remote_providers(config),
        holder=name,
        ttl_s=config.lease_ttl_s,
    )
    tending = asyncio.create_task(tend_for_ever(pool), name=f"tend sandboxes of {name}")
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


async def tend_for_ever(pool: LeasePool, report: Callable[[dict[str, float]], None] = lambda metrics: None) -> None:
    """Do the pool's periodic work: reclaim expired leases, extend sandboxes, sweep strays, report the metrics."""
    for num_rounds in itertools.count(1):
        await asyncio.sleep(TEND_EVERY_S)
        pool.tend()
        report(pool.stats())
        if num_rounds % round(_SWEEP_EVERY_S / TEND_EVERY_S) == 0 and pool.stock is not None:
            await pool.stock.sweep()


class PoolHere:
    """A `client.Pool` in this process."""

    def __init__(self, pool: LeasePool) -> None:
        self._pool = pool

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int) -> Lease:
        return await self._pool.acquire(holder, spec, timeout_s=timeout_s, lease_id=lease_id)

    async def release(self, lease_id: int, is_clean: bool) -> None:
        self._pool.release(lease_id, is_clean=is_clean)
