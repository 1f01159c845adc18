"""Shows how far a preparation is: a bar on a terminal, a line per tenth elsewhere, where a bar would fill the log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STEPS = 10


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with (split, rows done, rows in all)."""
    if not sys.stderr.isatty():
        yield _print_tenths
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bars:
        tasks = {}

        def show(split: str, done: int, total: int) -> None:
            if split not in tasks:
                tasks[split] = bars.add_task(split, total=total)
            bars.update(tasks[split], completed=done)

        yield show


def _print_tenths(split: str, done: int, total: int) -> None:
    if done * _STEPS // total != (done - 1) * _STEPS // total:
        print(f"{split}: {done} of {total} rows", file=sys.stderr, flush=True)
