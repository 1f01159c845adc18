"""The pool's numbers, as metrics. Pure; used by `pool.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayapp.sandbox.pool.keeper import Source

_LAST_WAITS = 2048


class PoolStats:
    """Counts since the start, and the waits of the last callers.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_granted = 0
        self.num_reclaimed = 0
        self._num_fallbacks = 0
        self._waits_s: deque[float] = deque(maxlen=_LAST_WAITS)
        self._clock = clock

    def waited(self, seconds: float, *, is_fallback: bool) -> None:
        """Note that a caller got its lease after so many seconds."""
        self._waits_s.append(seconds)
        self._num_fallbacks += is_fallback

    def scalars(self, *, num_leased: int, num_waiting: int, sources: Sequence[Source]) -> dict[str, float]:
        """`sandbox/*`; per provider `sandbox/<provider>/*`, failures by kind among them."""
        numbers = {
            "sandbox/leased": float(num_leased),
            "sandbox/waiting": float(num_waiting),
            "sandbox/granted": float(self.num_granted),
            "sandbox/reclaimed": float(self.num_reclaimed),
            "sandbox/fallbacks": float(self._num_fallbacks),
            "sandbox/wait_p50_s": self._percentile(0.5),
            "sandbox/wait_p99_s": self._percentile(0.99),
        }
        for source in sources:
            numbers |= _of(source)
        return numbers

    def _percentile(self, share: float) -> float:
        """Percentile of the waits by nearest rank; 0 before the first lease."""
        waits_s = sorted(self._waits_s)
        return waits_s[min(len(waits_s) - 1, int(share * len(waits_s)))] if waits_s else 0.0


def _of(source: Source) -> dict[str, float]:
    supply, keeper = source.supply, source.keeper
    if keeper is None:
        return {}
    prefix = f"sandbox/{supply.name}"
    numbers = {
        f"{prefix}/alive": float(len(supply.members)),
        f"{prefix}/ready": float(sum(1 for _ in supply.idle_members())),
        f"{prefix}/creating": float(supply.num_creating.total()),
        f"{prefix}/limit": float(supply.limit),
        f"{prefix}/created": float(keeper.num_created),
        f"{prefix}/ended": float(keeper.num_ended),
        f"{prefix}/strays_ended": float(keeper.num_strays_ended),
        f"{prefix}/late": float(keeper.num_late),
        f"{prefix}/soiled": float(keeper.num_soiled),
    }
    return numbers | {f"{prefix}/failed_{kind}": float(count) for kind, count in supply.failures.items()}
