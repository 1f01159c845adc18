"""How long an event loop is held up."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def nothing_holds_the_loop(limit_s: float, clock: Callable[[], float], *, doing: str = "") -> AsyncIterator[None]:
    """Watch the running loop for the length of the block.

    Args:
        limit_s: the most that `clock` may advance between two looks of the loop.
        clock: `time.thread_time` counts the loop's thread alone, `time.process_time` all threads.
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

    gc.freeze()  # to collect what earlier tests of this process left is no cost of the block
    looking = asyncio.create_task(look())
    try:
        yield
        await asyncio.sleep(0.002)
    finally:
        looking.cancel()
        gc.unfreeze()
    assert longest_s < limit_s, doing
