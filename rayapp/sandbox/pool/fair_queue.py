"""A queue that says who is next: holders take turns, and each holder's own callers are served in the order they came.

A worker that asks for a thousand sandboxes at once does not make the others wait for all of them. Pure; used by
`pool.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by holder; `pop` goes round the holders. Every operation takes constant time, `remove_all` one for each."""

    def __init__(self) -> None:
        # A dict as an ordered set: a caller that gives up leaves from the middle.
        self._waiting: OrderedDict[str, OrderedDict[int, T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, holder: str, key: int, item: T) -> None:
        """Add an item under a key of its own, with which `remove` finds it."""
        self._waiting.setdefault(holder, OrderedDict())[key] = item
        self._size += 1

    def pop(self) -> T:
        """The next item.

        Raises:
            IndexError: nobody waits.
        """
        if not self._waiting:
            raise IndexError("nobody waits")
        holder, items = next(iter(self._waiting.items()))
        _, item = items.popitem(last=False)
        self._size -= 1
        if items:
            self._waiting.move_to_end(holder)
        else:
            del self._waiting[holder]
        return item

    def first(self) -> T:
        """The item that `pop` would return, left in the queue.

        Raises:
            IndexError: nobody waits.
        """
        if not self._waiting:
            raise IndexError("nobody waits")
        return next(iter(next(iter(self._waiting.values())).values()))

    def remove(self, holder: str, key: int) -> bool:
        """Take one out of turn. False if it is not there any more."""
        items = self._waiting.get(holder)
        if items is None or items.pop(key, None) is None:
            return False
        self._size -= 1
        if not items:
            del self._waiting[holder]
        return True

    def remove_all(self, holder: str) -> list[T]:
        """Take all of a holder's out of turn. Returns them."""
        items = self._waiting.pop(holder, None)
        if items is None:
            return []
        self._size -= len(items)
        return [*items.values()]
