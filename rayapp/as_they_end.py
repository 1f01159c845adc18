"""Results of many coroutines as they end, those of one moment together: what goes over a wire as one message.

Used by servers that answer for a whole group in one call. Pure asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from rayapp.errors import RayappError

T = TypeVar("T")


async def as_they_end(coroutines: Sequence[Coroutine[Any, Any, T]]) -> AsyncIterator[list[tuple[int, T | Exception]]]:
    """Lists of (position, result or error), each as soon as it has something in it.

    Whoever stops listening cancels what is left. Errors that are not ours become ours, so that they can travel.
    """
    tasks = {asyncio.ensure_future(coroutine): position for position, coroutine in enumerate(coroutines)}
    left = set(tasks)
    try:
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            yield sorted(((tasks[task], _outcome(task)) for task in done), key=lambda pair: pair[0])
    finally:
        for task in left:
            task.cancel()


def _outcome(task: asyncio.Task[T]) -> T | Exception:
    if task.cancelled():
        return RayappError("cancelled")
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, RayappError | TimeoutError):
        return error
    return RayappError(f"{type(error).__name__}: {error}")
