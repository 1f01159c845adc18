"""The pool's queue, its forecast of demand, and its metrics.

`FairQueue` serves the lease holders in turn, and each holder's callers in their order, so a worker that requests a
thousand sandboxes does not delay the other workers. `Demand` predicts that the next step uses as many sandboxes of a
kind at the same time as the last step did:

    step: in use 0 1 2 … 32 … 3 0 -> training -> the next step finds 32 sandboxes ready
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from rayapp.sandbox.pool.stock import Supplier


class Demand:
    """Maximum number of sandboxes that were in use at the same time, over the last one to two windows.

    Args:
        window_s: length of a window in seconds: the maximum duration of a step.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, *, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self.num_in_use = 0
        self._peak = 0
        self._peak_before = 0
        self._window_ends_at = clock() + window_s

    def taken(self) -> None:
        """Record that one more sandbox is in use."""
        self._turn_over()
        self.num_in_use += 1
        self._peak = max(self._peak, self.num_in_use)

    def returned(self) -> None:
        """Record that one sandbox less is in use."""
        self._turn_over()
        self.num_in_use -= 1

    @property
    def num_ahead(self) -> int:
        """Return the number of sandboxes that should be ready now: the recent maximum minus the number in use."""
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


T = TypeVar("T")


class FairQueue(Generic[T]):
    """Queue that serves holders in turn. Each operation takes constant time, except `remove_all`, which takes linear
    time.
    """

    def __init__(self) -> None:
        # These are ordered dicts, not lists, because callers that no longer wait are removed from the middle.
        self._waiting: OrderedDict[str, OrderedDict[int, T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, holder: str, key: int, item: T) -> None:
        """Add an item of a holder. `remove` finds the item by the key."""
        self._waiting.setdefault(holder, OrderedDict())[key] = item
        self._size += 1

    def pop(self) -> T:
        """Remove and return the next item.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._waiting:
            raise IndexError("the queue is empty")
        holder, items = next(iter(self._waiting.items()))
        _, item = items.popitem(last=False)
        self._size -= 1
        if items:
            self._waiting.move_to_end(holder)
        else:
            del self._waiting[holder]
        return item

    def first(self) -> T:
        """Return the item that `pop` would return, and leave it in the queue.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._waiting:
            raise IndexError("the queue is empty")
        return next(iter(next(iter(self._waiting.values())).values()))

    def remove(self, holder: str, key: int) -> bool:
        """Remove one item. Return False if the item is not in the queue."""
        items = self._waiting.get(holder)
        if items is None or items.pop(key, None) is None:
            return False
        self._size -= 1
        if not items:
            del self._waiting[holder]
        return True

    def remove_all(self, holder: str) -> list[T]:
        """Remove and return all items of a holder."""
        items = self._waiting.pop(holder, None)
        if items is None:
            return []
        self._size -= len(items)
        return [*items.values()]


_LAST_WAITS = 2048


class PoolStats:
    """The pool's counts since its start, and how long the most recent callers waited."""

    def __init__(self) -> None:
        self.num_granted = 0
        self.num_reclaimed = 0
        self._num_fallbacks = 0
        self._waits_s: deque[float] = deque(maxlen=_LAST_WAITS)

    def waited(self, seconds: float, *, is_fallback: bool) -> None:
        """Record that a caller got its lease after this many seconds."""
        self._waits_s.append(seconds)
        self._num_fallbacks += is_fallback

    def scalars(self, *, num_leased: int, num_waiting: int, sources: Sequence[Supplier]) -> dict[str, float]:
        """Return the metrics `sandbox/*` and, per provider, `sandbox/<provider>/*` with failures by kind."""
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
        """Return a percentile of the recent waits, by nearest rank, in seconds; 0 before the first lease."""
        waits_s = sorted(self._waits_s)
        return waits_s[min(len(waits_s) - 1, int(share * len(waits_s)))] if waits_s else 0.0


def _of(source: Supplier) -> dict[str, float]:
    supply, stock = source.supply, source.stock
    if stock is None:
        return {}
    prefix = f"sandbox/{supply.name}"
    numbers = {
        f"{prefix}/alive": float(len(supply.items)),
        f"{prefix}/ready": float(sum(1 for _ in supply.idle_items())),
        f"{prefix}/creating": float(supply.num_creating.total()),
        f"{prefix}/limit": float(supply.limit),
        f"{prefix}/created": float(stock.num_created),
        f"{prefix}/ended": float(stock.num_ended),
        f"{prefix}/lived_s": stock.lived_s(),
        f"{prefix}/strays_ended": float(stock.num_strays_ended),
        f"{prefix}/late": float(stock.num_late),
        f"{prefix}/soiled": float(stock.num_soiled),
    }
    return numbers | {f"{prefix}/failed_{kind}": float(count) for kind, count in supply.failures.items()}
