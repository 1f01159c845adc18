"""Running the driver's coroutine to its end, whatever ends it: Ctrl-C and SIGTERM clean up first, one error among
concurrent tasks comes out as itself, and a way out that hangs ends all the same."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from rayapp.errors import first_error

T = TypeVar("T")
log = logging.getLogger(__name__)
STDERR = 2


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

    A second cancellation is a person who will not wait: it ends the coroutine too. An error of the coroutine does not
    undo a cancellation: it becomes its cause.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError as cancelled:
        try:
            await task
        except Exception as error:  # boundary: whatever it is, the caller has been told to stop
            log.warning("stopped, and what was to end first failed: %s: %s", type(error).__name__, error)
            raise cancelled from error
        raise


def is_stopping() -> bool:
    """Whether somebody has told the current task to stop. A task group that fails meanwhile raises its error only."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run cleanup to its end however often it is interrupted; it has deadlines of its own. A cancellation comes after.

    With `asyncio.shield` alone a second signal would let the caller go on, close the connection to Ray and end the
    actors before they gave back what they hold.
    """
    task = asyncio.ensure_future(coroutine)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


def end_process_after(seconds: float) -> None:
    """End this process with exit code 1 after so many seconds, whatever it does then: the last way out.

    The stacks of its threads go to stderr. It works when the event loop is blocked, when cleanup waits for ever, and
    when a thread that hangs on a disk keeps the interpreter from ending. One clock per process: each call sets it anew.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def let_process_live() -> None:
    """Stop the clock of `end_process_after`."""
    faulthandler.cancel_dump_traceback_later()
