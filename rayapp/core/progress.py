"""Shows the progress of a command: bars on a terminal, else a line for each tenth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STEPS = 10


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows progress: call it with (split, rows done, rows in all)."""
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
    if total and done * _STEPS // total != (done - 1) * _STEPS // total:
        print(f"{split}: {done} of {total}", file=sys.stderr, flush=True)
