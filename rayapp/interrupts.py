"""Running the driver's coroutine to its end, whatever ends it: Ctrl-C and SIGTERM clean up first, and one error among
concurrent tasks comes out as itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from rayapp.errors import first_error

T = TypeVar("T")


def run_until_done(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, with SIGTERM handled as Ctrl-C is.

    Raises:
        KeyboardInterrupt: on either signal, after the coroutine's cleanup has run.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        terminated = False

        async def cancelled_by_sigterm() -> T:
            nonlocal terminated
            task = asyncio.current_task()
            assert task is not None

            def on_sigterm() -> None:
                nonlocal terminated
                terminated = True
                task.cancel()

            loop.add_signal_handler(signal.SIGTERM, on_sigterm)
            return await coroutine

        try:
            return runner.run(cancelled_by_sigterm())
        except asyncio.CancelledError:
            if terminated:
                raise KeyboardInterrupt from None
            raise
        except BaseExceptionGroup as group:
            raise first_error(group) from group


async def uninterrupted(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end what must not be left half done; a cancellation that comes meanwhile takes effect after it.

    A second cancellation is a person who will not wait: it ends the coroutine too.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await task
        raise


async def to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run cleanup to its end however often it is interrupted; it has deadlines of its own. A cancellation comes after.

    With `asyncio.shield` alone a second signal would let the caller go on, close the connection to Ray and end the
    actors before they gave back what they hold.
    """
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
