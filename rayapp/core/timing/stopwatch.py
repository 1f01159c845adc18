"""Where wall time goes: named stretches that don't overlap, and what is in none of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Adds up seconds by name, from its construction on.

    Args:
        on_change: told the name of each stretch as it starts.
        synchronize: called before a stretch ends. Kernels of a GPU run on after the call that launched them: without
            it their time lands on the next name.
    """

    def __init__(
        self, *, on_change: Callable[[str], None] = lambda name: None, synchronize: Callable[[], None] = lambda: None
    ) -> None:
        self._on_change = on_change
        self._synchronize = synchronize
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time inside under `name`. Stretches must not nest."""
        self._on_change(name)
        started = time.perf_counter()
        try:
            yield
            self._synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, names: tuple[str, ...] = ()) -> tuple[dict[str, float], float]:
        """By name, 0 for those of `names` that did not begin, with `other` for the rest; and in total: their sum."""
        total_s = time.perf_counter() - self._started
        seconds = dict.fromkeys(names, 0.0) | self._seconds
        return seconds | {"other": total_s - sum(seconds.values())}, total_s
