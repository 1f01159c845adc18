"""What a test may say of time: seconds of a processor, without the garbage of the tests before it.

A worker of pytest holds what thousands of tests have imported and made. One full collection of that takes up to a
second and a half, and comes when anybody allocates: it is no cost of the code that a test looks at.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager


@contextmanager
def without_older_garbage() -> Iterator[None]:
    """Collections within the block pass over the objects that were there before it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def takes_at_most_s(limit_s: float, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """`clock` advances by less than `limit_s` in the block.

    Args:
        limit_s: far above what the block takes, and far below what it would take with the fault that the test is for.
        clock: `time.thread_time` counts this thread alone, `time.process_time` all threads.
    Raises:
        AssertionError: it advanced by more.
    """
    with without_older_garbage():
        began_s = clock()
        yield
        took_s = clock() - began_s
    assert took_s < limit_s


@asynccontextmanager
async def nothing_holds_the_loop(limit_s: float, clock: Callable[[], float], *, doing: str = "") -> AsyncIterator[None]:
    """Watch the running loop for the length of the block.

    Args:
        limit_s: the most that `clock` may advance between two looks of the loop.
        clock: as in `takes_at_most_s`.
        doing: what is told with a failure.
    Raises:
        AssertionError: it advanced by more.
    """
    longest_s = 0.0

    async def look() -> None:
        nonlocal longest_s
        while True:
            before = clock()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, clock() - before)

    with without_older_garbage():
        looking = asyncio.create_task(look())
        try:
            yield
            await asyncio.sleep(0.002)
        finally:
            looking.cancel()
    assert longest_s < limit_s, doing
