"""Actors that manage a run's sandboxes: `sandbox-pool` leases them, `sandbox-reaper-RUN` ends remote ones left behind.

The driver owns the pool: when it is gone, Ray ends the pool. The reaper is detached and survives a SIGKILL of the
driver: without the pool's heartbeats it ends the run's sandboxes and then itself.
"""

from __future__ import annotations

import asyncio
import logging

import ray

from actors.handles import Restartable, SandboxReaperHandle
from actors.metrics import Reporter
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import RayappError
from rayapp.core.logs import label_logs
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Fate, Lease
from rayapp.sandbox.pool.build import TEND_EVERY_S, build_pool, labels_of, tend_for_ever
from rayapp.sandbox.pool.reaper import Reaper
from rayapp.sandbox.providers import listing_providers

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 15.0  # well below the driver's deadline for `close`, after which this process is killed


class PoolActor(Restartable):
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
        """Send heartbeats to the reaper from now on. Call it before `ready`, so before any sandbox exists."""
        self._reaper = reaper
        await reaper.beat(labels_of(self._run_name), timeout_s)

    async def ready(self) -> dict[str, float]:
        """End sandboxes of an earlier run of this name on this host, then start the pool's periodic work."""
        if not self._chores:
            ended = await self._pool.stock.sweep(stray_after_s=0.0) if self._pool.stock is not None else 0
            if ended:
                log.warning("ended %d sandboxes of an earlier run %s", ended, self._run_name)
            report = Reporter(self._run_name).report
            tending = tend_for_ever(self._pool, report)
            self._chores = [asyncio.create_task(tending, name="tend sandboxes")]
            if self._reaper is not None:
                self._chores.append(asyncio.create_task(self._beat_for_ever(self._reaper), name="beat for the reaper"))
            if self._config.min_ready:
                self._pool.keep_ready(SandboxSpec())
        return self._pool.stats()

    async def _beat_for_ever(self, reaper: SandboxReaperHandle) -> None:
        while True:
            await asyncio.sleep(min(TEND_EVERY_S, self._config.reaper_grace_s / 4))
            try:
                await reaper.beat(labels_of(self._run_name))
            except RayappError as error:
                # Without its reaper a run still ends its sandboxes itself, and the providers' time limits remain.
                log.warning("the sandbox reaper does not answer: %s", error)

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int | None = None) -> Lease:
        return await self._pool.acquire(holder, spec, timeout_s=timeout_s, lease_id=lease_id)

    async def release(self, lease_id: int, fate: Fate) -> None:
        self._pool.release(lease_id, fate)

    async def reclaim(self, holder: str) -> int:
        """Take back the leases of a holder that is dead. Return their number."""
        return self._pool.reclaim_of(holder)

    async def stats(self) -> dict[str, float]:
        return self._pool.stats()

    async def close(self) -> None:
        """End every sandbox of the run. Idempotent."""
        chores, self._chores = self._chores, []
        for chore in chores:
            chore.cancel()
        left = await self._pool.close(timeout_s=CLOSE_TIMEOUT_S)
        if left:
            # Don't dismiss the reaper: when heartbeats stop, it ends the sandboxes, and retries for longer than this
            # process can.
            log.error(
                "%d sandboxes may be left; list them with: rayapp sandbox reap --run %s --dry-run",
                len(left),
                self._run_name,
            )
        elif self._reaper is not None:
            reaper, self._reaper = self._reaper, None
            try:
                await reaper.dismiss()
            except RayappError as error:
                log.warning("the sandbox reaper does not answer: %s", error)


class SandboxReaper:
    """Actor of the reaper. Construct it inside a running event loop, as Ray does for async actors."""

    def __init__(self, config: SandboxConfig, run_name: str) -> None:
        label_logs(run_name)
        self._run_name = run_name
        self._reaper = Reaper(listing_providers(config), grace_s=config.reaper_grace_s)
        # Watch from now on, not from the first heartbeat: if the driver dies before that, this process must still end.
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="watch the run")

    def __repr__(self) -> str:
        return f"sandbox-reaper({self._run_name})"

    async def beat(self, labels: dict[str, str]) -> None:
        self._reaper.beat(labels)

    async def dismiss(self) -> None:
        """Stop watching, because the run has ended normally."""
        self._reaper.dismiss()

    async def _watch(self) -> None:
        try:
            num_ended = await self._reaper.watch()
            if num_ended:
                log.warning("run %s is gone; ended %d of its sandboxes", self._run_name, num_ended)
        finally:
            # A detached actor has no owner that ends it, so it must end itself.
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
