"""`sandbox-pool`: who uses which sandbox, over all rollout workers. A thin shell around `rayapp.sandbox.pool.pool`.

It makes and ends remote sandboxes and hands out leases; code and outputs never pass through it. Owned by the driver:
when the driver is gone, Ray ends this process, and what it leaves at a provider falls to the reaper.
"""

from __future__ import annotations

import asyncio
import logging

from actors.calls import Restartable
from actors.handles import SandboxReaperHandle
from actors.metrics import Reporter
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import RayappError
from rayapp.core.logs import label_logs
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Fate, Lease
from rayapp.sandbox.pool.build import build_pool, labels_of

log = logging.getLogger(__name__)
TEND_EVERY_S = 5.0
CLOSE_TIMEOUT_S = 15.0
"""Well below the driver's deadline for `close`: past that this process is killed in the middle of ending sandboxes."""


class SandboxPool(Restartable):
    """See the module.

    Args:
        config: of the run's sandboxes.
        run_name: labels the sandboxes; for the dashboard.
    Raises:
        SandboxConfigError: a provider's package or key is not there.
    """

    def __init__(self, config: SandboxConfig, run_name: str) -> None:
        label_logs(run_name)
        self._config = config
        self._run_name = run_name
        self._pool = build_pool(config, run_name)
        self._chores: list[asyncio.Task[None]] = []
        self._reaper: SandboxReaperHandle | None = None

    def __repr__(self) -> str:
        return f"sandbox-pool({self._run_name})"

    async def guard(self, reaper: SandboxReaperHandle, timeout_s: float) -> None:
        """From now on tell the reaper that this run lives. Called before `ready`, so before any sandbox exists."""
        self._reaper = reaper
        await reaper.beat(labels_of(self._run_name), timeout_s)

    async def ready(self) -> dict[str, float]:
        """End what an earlier run of this name left on this host, then start the housekeeping. Returns `stats`."""
        if not self._chores:
            await self._sweep(stray_after_s=0.0)
            self._chores = [
                asyncio.create_task(self._tend_for_ever(), name="tend sandboxes"),
                asyncio.create_task(self._sweep_for_ever(), name="sweep stray sandboxes"),
            ]
            if self._reaper is not None:
                self._chores.append(asyncio.create_task(self._beat_for_ever(self._reaper), name="beat for the reaper"))
            if self._config.min_ready:
                self._pool.prefetch(SandboxSpec(), self._config.min_ready)
        return self._pool.stats()

    async def _tend_for_ever(self) -> None:
        reporter = Reporter(self._run_name)
        while True:
            await asyncio.sleep(TEND_EVERY_S)
            self._pool.tend()
            reporter.report(self._pool.stats())

    async def _beat_for_ever(self, reaper: SandboxReaperHandle) -> None:
        while True:
            await asyncio.sleep(min(TEND_EVERY_S, self._config.reaper_grace_s / 4))
            try:
                await reaper.beat(labels_of(self._run_name))
            except RayappError as error:
                # A run without its reaper still ends its sandboxes itself, and the providers' time limits remain.
                log.warning("the sandbox reaper does not answer: %s", error)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_every_s)
            await self._sweep()

    async def _sweep(self, stray_after_s: float | None = None) -> None:
        keepers = [source.keeper for source in self._pool.sources if source.keeper is not None]
        ended = sum(await asyncio.gather(*(keeper.sweep(stray_after_s=stray_after_s) for keeper in keepers)))
        if ended:
            log.warning("ended %d stray sandboxes of run %s", ended, self._run_name)

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int | None = None) -> Lease:
        """See `LeasePool.acquire`."""
        return await self._pool.acquire(holder, spec, timeout_s=timeout_s, lease_id=lease_id)

    async def release(self, lease_id: int, fate: Fate) -> None:
        """See `LeasePool.release`."""
        self._pool.release(lease_id, fate)

    async def heartbeat(self, holder: str) -> None:
        """See `LeasePool.heartbeat`."""
        self._pool.heartbeat(holder)

    async def reclaim(self, holder: str) -> int:
        """A holder is dead: take back what it held. Returns how many leases."""
        return self._pool.reclaim_of(holder)

    async def prefetch(self, spec: SandboxSpec, num_ready: int) -> None:
        """See `LeasePool.prefetch`."""
        self._pool.prefetch(spec, num_ready)

    async def stats(self) -> dict[str, float]:
        """`sandbox/*` metrics."""
        return self._pool.stats()

    async def close(self) -> None:
        """End every sandbox of the run. Idempotent."""
        chores, self._chores = self._chores, []
        for chore in chores:
            chore.cancel()
        left = await self._pool.close(timeout_s=CLOSE_TIMEOUT_S)
        if left:
            # The reaper is not dismissed: it hears no more, and tries for longer than this process can wait.
            log.error("%d sandboxes may be left: rayapp sandbox reap --run %s --dry-run", len(left), self._run_name)
        elif self._reaper is not None:
            reaper, self._reaper = self._reaper, None
            try:
                await reaper.dismiss()
            except RayappError as error:
                log.warning("the sandbox reaper does not answer: %s", error)
