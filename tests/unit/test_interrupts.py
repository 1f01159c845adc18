"""Cleanup runs to its end however often it is interrupted."""

from __future__ import annotations

import asyncio

import pytest

from rayapp.interrupts import to_the_end


async def test_cleanup_that_is_cancelled_twice_ends_first_and_the_cancellation_comes_after() -> None:
    may_end, done = asyncio.Event(), []

    async def cleanup() -> None:
        await may_end.wait()
        done.append("cleaned")

    task = asyncio.create_task(to_the_end(cleanup()))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["cleaned"]


async def test_cleanup_gives_its_result_and_its_error() -> None:
    async def works() -> int:
        return 7

    async def fails() -> None:
        raise ValueError("the disk is full")

    assert await to_the_end(works()) == 7
    with pytest.raises(ValueError, match="the disk is full"):
        await to_the_end(fails())


async def test_cleanup_that_is_itself_ended_does_not_wait_for_ever() -> None:
    async def cleanup() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(to_the_end(cleanup()), 5)
