"""`sandbox-reaper-RUN`: ends a run's remote sandboxes when the run is gone. A thin shell around `rayapp.sandbox.reaper`.

Detached: it belongs to the Ray cluster and not to the driver, so a driver killed with SIGKILL does not take it along. The
pool's heartbeat keeps it waiting; silence makes it sweep, and then it ends itself.
"""

from __future__ import annotations

import asyncio
import logging

import ray

from rayapp.sandbox.config import SandboxConfig
from rayapp.sandbox.providers import remote_providers
from rayapp.sandbox.reaper import Reaper

log = logging.getLogger(__name__)


class SandboxReaper:
    """See the module.

    Args:
        config: of the run's sandboxes.
        run_name: whose sandboxes to end.
    """

    def __init__(self, config: SandboxConfig, run_name: str) -> None:
        self._run_name = run_name
        self._reaper = Reaper(remote_providers(config), run_name, grace_s=config.reaper_grace_s)
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"sandbox-reaper({self._run_name})"

    async def beat(self) -> None:
        """The run lives. The first call starts the watch."""
        self._reaper.beat()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="watch the run")

    async def dismiss(self) -> None:
        """The run has ended in order."""
        self._reaper.dismiss()

    async def _watch(self) -> None:
        try:
            num_ended = await self._reaper.watch()
            if num_ended:
                log.warning("run %s is gone; ended %d of its sandboxes", self._run_name, num_ended)
        finally:
            # Nobody owns a detached actor: it would stay for ever.
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
