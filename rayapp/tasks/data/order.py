"""The order in which training reads rows: a pure function of seed, epoch and the files' layout, so nothing is saved.

Row groups are shuffled, then rows within *windows* of whole row groups, so that a reader holds one window and not the
data set. Data that fits one window (the default is 65,536 rows) is shuffled as a whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Row groups that are held in memory, and shuffled, together."""

    start: int
    """Position in the epoch of the window's first row."""
    groups: tuple[int, ...]
    num_rows: int


def windows(group_sizes: Sequence[int], *, window_rows: int, seed: int, epoch: int, shuffle: bool) -> list[Window]:
    """The epoch's windows in order. Every group with rows is in exactly one.

    Args:
        group_sizes: rows that are used, by row group.
        window_rows: a window is closed before it would grow beyond this; one larger group is a window of its own.
    """
    order = [group for group, size in enumerate(group_sizes) if size]
    if shuffle:
        random.Random(f"data-groups:{seed}:{epoch}").shuffle(order)
    found: list[Window] = []
    start, held, num_rows = 0, list[int](), 0
    for group in order:
        if held and num_rows + group_sizes[group] > window_rows:
            found.append(Window(start=start, groups=tuple(held), num_rows=num_rows))
            start, held, num_rows = start + num_rows, [], 0
        held.append(group)
        num_rows += group_sizes[group]
    if held:
        found.append(Window(start=start, groups=tuple(held), num_rows=num_rows))
    return found


def row_order(window: Window, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Which of the window's rows (0 is the first row of its first group) comes 1st, 2nd, … within it."""
    order = list(range(window.num_rows))
    if shuffle:
        random.Random(f"data-rows:{seed}:{epoch}:{window.start}").shuffle(order)
    return order
