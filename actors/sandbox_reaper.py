"""`sandbox-reaper-RUN`: ends a run's remote sandboxes when the run is gone. A thin shell around `sandbox.reaper`.

Detached: it belongs to the Ray cluster and not to the driver, so a driver killed with SIGKILL does not take it along.
The pool's heartbeat keeps it waiting; silence makes it sweep, and then it ends itself. The pool dismisses it when
nothing is left to end.
"""

from __future__ import annotations

import asyncio
import logging

import ray

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.logs import label_logs
from rayapp.sandbox.pool.reaper import Reaper
from rayapp.sandbox.providers.table import listing_providers

log = logging.getLogger(__name__)


class SandboxReaper:
    """See the module. Made inside a running event loop: Ray makes async actors there.

    Args:
        config: of the run's sandboxes.
        run_name: for the log and the dashboard.
    Raises:
        SandboxConfigError: a provider's package or key is not there.
    """

    def __init__(self, config: SandboxConfig, run_name: str) -> None:
        label_logs(run_name)
        self._run_name = run_name
        self._reaper = Reaper(listing_providers(config), grace_s=config.reaper_grace_s)
        # From here on and not from the first beat: a driver that dies in between must not leave this process for ever.
        self._watching = asyncio.get_running_loop().create_task(self._watch(), name="watch the run")

    def __repr__(self) -> str:
        return f"sandbox-reaper({self._run_name})"

    async def beat(self, labels: dict[str, str]) -> None:
        """The run lives, and its sandboxes carry these labels."""
        self._reaper.beat(labels)

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
