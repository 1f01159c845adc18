"""The actors of a run so far, in the order of their start: added by `actors.setup.starting`, ended in reverse by
`close`.

One `Started` per run, in the driver; `rayapp.driver.cluster` closes it in a `finally`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.setup.placement import Placement
from actors.spawn import Seat, kill, spawn
from rayapp.core.errors import RayappError

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIns:
    """Servers without vLLM and learners without a model: see `actors.stand_ins`."""

    completion_s: float = 0.0
    step_s: float | None = 0.0
    """None: the learners are the real ones."""
    scripts: tuple[tuple[tuple[int, ...] | str, ...], ...] = ()
    """What a trajectory says, turn by turn; its seed chooses which of these. Token ids, or where nothing reads those
    the text. None: any tokens."""


class Started:
    """See the module.

    Args:
        stand_ins: in place of the real servers and learners.
    """

    def __init__(self, stand_ins: StandIns | None = None) -> None:
        self._stand_ins = stand_ins
        self._handles: list[Any] = []
        self.placement: Placement | None = None

    def server(self, name: str, *args: object, seat: Seat) -> Any:
        """Spawn a server, or what stands for one."""
        if self._stand_ins is None:
            return spawn("vllm-server", name, *args, seat=seat)
        return spawn("scripted-server", name, *args, self._stand_ins.completion_s, self._stand_ins.scripts, seat=seat)

    def learner(self, name: str, *args: object, seat: Seat) -> Any:
        """Spawn a learner, or what stands for one."""
        if self._stand_ins is None or self._stand_ins.step_s is None:
            return spawn("learner", name, *args, seat=seat)
        return spawn("instant-learner", name, *args, self._stand_ins.step_s, seat=seat)

    def add(self, handle: Any) -> Any:
        self._handles.append(handle)
        return handle

    async def end(self, handles: Sequence[Any]) -> None:
        """End some of them at once, with no leave."""
        for handle in handles:
            self._handles.remove(handle)
            kill(handle.actor)

    @property
    def names(self) -> list[str]:
        return [handle.name for handle in self._handles]

    async def close(self) -> None:
        """Ask every actor to end cleanly, then end those that did not answer. Never raises: it runs in `finally`."""
        for handle in reversed(self._handles):
            if hasattr(handle, "close"):
                try:
                    await handle.close(CLOSE_TIMEOUT_S)
                except (RayappError, asyncio.CancelledError) as error:
                    log.warning("%s did not end cleanly: %s", handle.name, error)
            kill(handle.actor)
        self._handles.clear()
        if self.placement is not None:
            self.placement.release()
