"""The pool's queue and its metrics."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Queue that serves holders in turn, so that a worker with many requests does not delay the others."""

    def __init__(self) -> None:
        # These are ordered dicts, not lists, because callers that no longer wait are removed from the middle.
        self._waiting: OrderedDict[str, OrderedDict[int, T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, holder: str, key: int, item: T) -> None:
        """Add an item of a holder. `remove` finds it by the key."""
        self._waiting.setdefault(holder, OrderedDict())[key] = item
        self._size += 1

    def pop(self) -> T:
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
        """Return the item that `pop` would return, and leave it in the queue."""
        if not self._waiting:
            raise IndexError("the queue is empty")
        return next(iter(next(iter(self._waiting.values())).values()))

    def remove(self, holder: str, key: int) -> bool:
        """Remove one item; False if it is not in the queue."""
        items = self._waiting.get(holder)
        if items is None or items.pop(key, None) is None:
            return False
        self._size -= 1
        if not items:
            del self._waiting[holder]
        return True

    def remove_all(self, holder: str) -> list[T]:
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
        self._waits_s: deque[float] = deque(maxlen=_LAST_WAITS)

    def waited(self, seconds: float) -> None:
        self._waits_s.append(seconds)

    def scalars(self, *, num_leased: int, num_waiting: int) -> dict[str, float]:
        return {
            "sandbox/leased": float(num_leased),
            "sandbox/waiting": float(num_waiting),
            "sandbox/granted": float(self.num_granted),
            "sandbox/reclaimed": float(self.num_reclaimed),
            "sandbox/wait_p50_s": self._percentile(0.5),
            "sandbox/wait_p99_s": self._percentile(0.99),
        }

    def _percentile(self, share: float) -> float:
        """Return a percentile of the recent waits, by nearest rank; 0 before the first lease."""
        waits_s = sorted(self._waits_s)
        return waits_s[min(len(waits_s) - 1, int(share * len(waits_s)))] if waits_s else 0.0
