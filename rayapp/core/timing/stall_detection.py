"""Notices, inside a process, that what it has in hand does not get on although the process answers every call.

One `InHand` in each vLLM server and rollout worker; their `ping` asks it, and `supervision` replaces who is stalled as
it replaces who hangs. It never stops anything itself. What no single process can see is `watchdog`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayapp.core.errors import StalledError


class InHand:
    """See the module.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}
        """Time of the beginning by number of the work, and so in order of time."""
        self._num_begun = 0
        self._moved_at = clock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one piece of work as in hand while the block runs. Leaving the block without an error is a move."""
        self._num_begun = key = self._num_begun + 1
        self._begun[key] = self._clock()
        try:
            yield
            self.moved()
        finally:
            del self._begun[key]

    def moved(self) -> None:
        """Note that some of the work got on: a token was sampled, new weights are in."""
        self._moved_at = self._clock()

    def check_moves(self, limit_s: float, *, who: str, work: str) -> None:
        """Return unless there is work of which nothing has moved for limit_s.

        Raises:
            StalledError: nothing has.
        """
        if not self._begun:
            return
        still_s = self._clock() - max(self._moved_at, self._oldest)
        if still_s >= limit_s:
            raise StalledError(
                f"{who} answers, but none of the {len(self._begun)} {work} it has in hand got on for {still_s:.0f} s "
                f"(recovery.stall_replace_s = {limit_s:g})."
            )

    def check_ends(self, limit_s: float, *, who: str, work: str) -> None:
        """Return unless a piece of work has been in hand for limit_s.

        Raises:
            StalledError: one has.
        """
        if self._begun and (age_s := self._clock() - self._oldest) >= limit_s:
            raise StalledError(
                f"{who} answers, but one of the {len(self._begun)} {work} it has in hand has not ended after "
                f"{age_s:.0f} s, past rollout.group_deadline_s, which it keeps itself."
            )

    @property
    def _oldest(self) -> float:
        return next(iter(self._begun.values()))
