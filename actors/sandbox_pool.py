"""`sandbox-pool`: how many sandboxes run at once, over all rollout workers. A thin shell around `LeasePool`."""

from __future__ import annotations

import asyncio
import os

from rayapp.sandbox.config import SandboxConfig
from rayapp.sandbox.pool import Lease, LeasePool

RECLAIM_EVERY_S = 5.0


class SandboxPool:
    """See the module.

    Args:
        config: of the run's sandboxes.
        run_name: for the dashboard.
    """

    def __init__(self, config: SandboxConfig, run_name: str) -> None:
        self._run_name = run_name
        self._pool = LeasePool(
            max_leases=config.max_leases or len(os.sched_getaffinity(0)),
            max_waiting=config.max_waiting,
            ttl_s=config.lease_ttl_s,
        )
        self._reclaimer: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"sandbox-pool({self._run_name})"

    async def ready(self) -> dict[str, float]:
        """Start taking back expired leases. Returns `stats`."""
        if self._reclaimer is None:
            self._reclaimer = asyncio.create_task(self._reclaim_for_ever(), name="reclaim expired leases")
        return self._pool.stats()

    async def _reclaim_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RECLAIM_EVERY_S)
            self._pool.reclaim_expired()

    async def acquire(self, holder: str, timeout_s: float) -> Lease:
        """See `LeasePool.acquire`."""
        return await self._pool.acquire(holder, timeout_s=timeout_s)

    async def release(self, lease_id: int) -> None:
        """See `LeasePool.release`."""
        self._pool.release(lease_id)

    async def stats(self) -> dict[str, float]:
        """`sandbox/*` metrics."""
        return self._pool.stats()

    async def close(self) -> None:
        """Stop the background task. Idempotent."""
        if self._reclaimer is not None:
            self._reclaimer.cancel()
            self._reclaimer = None
