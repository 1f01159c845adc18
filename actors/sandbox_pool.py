"""The actor `sandbox-pool`, which leases a run's sandboxes.

The driver owns the pool: when the driver is gone, Ray ends the pool, and the provider ends the sandboxes that the pool
no longer extends.
"""

from __future__ import annotations

import asyncio
import logging

from actors.handles import Restartable
from actors.metrics import Reporter
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.logs import label_logs
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Lease
from rayapp.sandbox.pool.build import build_pool, tend_for_ever

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 15.0  # well below the driver's deadline for `close`, after which this process is killed


class PoolActor(Restartable):
    def __init__(self, config: SandboxConfig, run_name: str) -> None:
        label_logs(run_name)
        self._config = config
        self._run_name = run_name
        self._pool = build_pool(config, run_name)
        self._tending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"sandbox-pool({self._run_name})"

    async def ready(self) -> dict[str, float]:
        """End sandboxes of an earlier run of this name on this host, then start the pool's periodic work."""
        if self._tending is None:
            ended = await self._pool.stock.sweep(stray_after_s=0.0) if self._pool.stock is not None else 0
            if ended:
                log.warning("ended %d sandboxes of an earlier run %s", ended, self._run_name)
            tending = tend_for_ever(self._pool, Reporter(self._run_name).report)
            self._tending = asyncio.create_task(tending, name="tend sandboxes")
            if self._config.min_ready:
                self._pool.keep_ready(SandboxSpec())
        return self._pool.stats()

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int | None = None) -> Lease:
        return await self._pool.acquire(holder, spec, timeout_s=timeout_s, lease_id=lease_id)

    async def release(self, lease_id: int, is_clean: bool) -> None:
        self._pool.release(lease_id, is_clean=is_clean)

    async def reclaim(self, holder: str) -> int:
        """Take back the leases of a holder that is dead. Return their number."""
        return self._pool.reclaim_of(holder)

    async def stats(self) -> dict[str, float]:
        return self._pool.stats()

    async def close(self) -> None:
        """End every sandbox of the run. Idempotent."""
        if self._tending is not None:
            self._tending.cancel()
        if left := await self._pool.close(timeout_s=CLOSE_TIMEOUT_S):
            log.error(
                "%d sandboxes may be left; list them with: rayapp sandbox reap --run %s --dry-run",
                len(left),
                self._run_name,
            )
