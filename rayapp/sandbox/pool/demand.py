"""Predicts how many sandboxes of a kind the next step wants at once: as many as the last. Pure; for `pool.py`.

step: in use 0 1 2 … 32 … 3 0 -> training -> the next step finds 32 ready instead of asking for 32
"""

from __future__ import annotations

from collections.abc import Callable


class Demand:
    """The largest number in use at once, remembered for one to two windows.

    Args:
        window_s: as long as a step may take.
        clock: monotonic seconds.
    """

    def __init__(self, *, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self.num_in_use = 0
        self._peak = 0
        self._peak_before = 0
        self._window_ends_at = clock() + window_s

    def taken(self) -> None:
        """Note that one more is in use."""
        self._turn_over()
        self.num_in_use += 1
        self._peak = max(self._peak, self.num_in_use)

    def returned(self) -> None:
        """Note that one less is in use."""
        self._turn_over()
        self.num_in_use -= 1

    @property
    def num_ahead(self) -> int:
        """How many to have ready now: with those in use they make the largest number of late."""
        self._turn_over()
        return max(self._peak, self._peak_before) - self.num_in_use

    def _turn_over(self) -> None:
        now = self._clock()
        if now < self._window_ends_at:
            return
        is_next = now < self._window_ends_at + self._window_s
        self._peak_before = self._peak if is_next else self.num_in_use
        self._peak = self.num_in_use
        self._window_ends_at = now + self._window_s
