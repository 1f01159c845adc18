"""Waits and time limits of tests: processor seconds, without the garbage of earlier tests.

A pytest worker holds the modules and objects of thousands of tests. One full garbage collection of them takes up to 1.5
s and can start at any allocation: the code under test is not to blame for it.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil


def wait_until(
    holds: Callable[[], bool],
    told: Callable[[], str] = lambda: "",
    *,
    process: subprocess.Popen[Any] | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Return when the condition holds.

    Raises:
        AssertionError: it does not hold in time, or the process ended before; with what `told` returns.
    """
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert process is None or process.poll() is None, told()
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


@contextmanager
def without_older_garbage() -> Iterator[None]:
    """Let collections within the block skip all objects made before it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def slowness() -> float:
    """Return how many times as long as on a core of a Zen 5 plain Python takes here and now; at least 1."""

    def python_s() -> float:
        began_s = time.thread_time()
        sum(number * 3 % 7 for number in range(50_000))
        return time.thread_time() - began_s

    return max(1.0, min(python_s() for _ in range(5)) / 0.0022)


@contextmanager
def takes_at_most_s(limit_s: float, clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """Fail if `clock` advances by more than `limit_s` in the block.

    Args:
        limit_s: far above the block's normal time, and far below its time with the fault that the test looks for, on a
            Zen 5; a slower core gets more (`slowness`).
        clock: `time.thread_time` counts this thread alone, `time.process_time` all threads.
    Raises:
        AssertionError: it advanced by more.
    """
    with without_older_garbage():
        began_s = clock()
        yield
        took_s = clock() - began_s
    assert took_s < limit_s or took_s < limit_s * slowness()


@asynccontextmanager
async def nothing_holds_the_loop(limit_s: float, clock: Callable[[], float], *, doing: str = "") -> AsyncIterator[None]:
    """Fail if the running event loop is blocked for longer than `limit_s` during the block.

    Args:
        limit_s: the most that `clock` may advance between two iterations of the loop, on a Zen 5.
        clock: as in `takes_at_most_s`.
        doing: description of the work, for the message.
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
    assert longest_s < limit_s or longest_s < limit_s * slowness(), doing


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def lives(pid: int) -> bool:
    """False for a zombie too, since no process may be there to reap it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
