"""Circuit breaker: when to leave a failing provider alone, and for how long. Pure; used by `supply.py`."""

from __future__ import annotations

import random
from collections.abc import Callable

MAX_COOLDOWN_S = 600.0
FIRST_BACKOFF_S = 0.2


class CircuitBreaker:
    """Closed: calls go through, each failure waits longer. Open: none. After the cool-down: one trial, that decides.

    Args:
        failures: number of failures in a row that open it.
        cooldown_s: how long the first opening lasts; doubled with each failed trial, up to ten minutes.
        clock: monotonic seconds.
        rng: for the jitter of pauses, so that many pools do not come back in the same moment.
    """

    def __init__(
        self, *, failures: int, cooldown_s: float, clock: Callable[[], float], rng: random.Random | None = None
    ) -> None:
        self._failures = failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._rng = rng or random.Random()
        self._num_failed = 0
        self._open_until: float | None = None
        self._next_cooldown_s = cooldown_s

    @property
    def is_open(self) -> bool:
        """True while no call may be made."""
        return self._open_until is not None and self._clock() < self._open_until

    @property
    def is_on_trial(self) -> bool:
        """True when the cool-down is over: one call may be made, and its outcome decides."""
        return self._open_until is not None and not self.is_open

    @property
    def reopens_in_s(self) -> float:
        """Seconds until a call may be made; 0 when one may now."""
        return max(0.0, self._open_until - self._clock()) if self._open_until is not None else 0.0

    def succeeded(self) -> None:
        """Note that a call came through: the breaker is closed, and past failures are forgotten."""
        self._num_failed = 0
        self._open_until = None
        self._next_cooldown_s = self._cooldown_s

    def failed(self) -> float:
        """Note that a call failed. Returns seconds until the next one: exponential, with jitter, while closed."""
        was_on_trial = self.is_on_trial
        self._num_failed += 1
        if was_on_trial or (self._open_until is None and self._num_failed >= self._failures):
            self._open_until = self._clock() + self._next_cooldown_s * self._rng.uniform(1.0, 1.2)
            self._next_cooldown_s = min(MAX_COOLDOWN_S, self._next_cooldown_s * 2)
        exponent = min(self._num_failed, 10) - 1
        return float(min(FIRST_BACKOFF_S * 2**exponent, self._cooldown_s) * self._rng.uniform(0.5, 1.0))
