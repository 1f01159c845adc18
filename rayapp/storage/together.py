"""Runs transfers side by side and raises one plain error: callers never see an exception group."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from rayapp.errors import one_error

T = TypeVar("T")


async def together(work: Callable[[T], Awaitable[None]], items: Iterable[T], *, at_once: int | None = None) -> None:
    """Do `work` for every item. The first failure cancels the rest and is raised when they have ended.

    Args:
        at_once: most items in work at the same time; None leaves that to `work`.
    """
    slots = asyncio.Semaphore(at_once) if at_once else None

    async def one(item: T) -> None:
        if slots is None:
            return await work(item)
        async with slots:
            return await work(item)

    with one_error():
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(one(item))
