"""How fast a provider may be asked for sandboxes. Pure; used by `supply.py`."""

from __future__ import annotations

from collections.abc import Callable


class TokenBucket:
    """`rate_per_s` tokens a second, at most `burst` saved up.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, rate_per_s: float, burst: int, clock: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._clock = clock
        self._tokens = float(burst)
        self._updated_at = clock()
        self._blocked_until = 0.0

    def block_for(self, seconds: float) -> None:
        """Give no token for so long, as the provider asked to wait. A shorter wait never lifts a longer one."""
        self._blocked_until = max(self._blocked_until, self._clock() + seconds)

    def wait_s(self) -> float:
        """Seconds until `take` succeeds; 0 when it does now."""
        now = self._clock()
        # A clock that jumps back must not take tokens away.
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._updated_at) * self._rate_per_s)
        self._updated_at = now
        missing_s = max(0.0, 1.0 - self._tokens) / self._rate_per_s
        return max(0.0, missing_s, self._blocked_until - now)

    def take(self) -> bool:
        """Take a token, if there is one."""
        # Tolerate rounding, which may leave a billionth of a token missing for ever.
        if self.wait_s() > 1e-9:
            return False
        self._tokens -= 1.0
        return True
