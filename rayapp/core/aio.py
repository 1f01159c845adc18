"""Run coroutines: react to signals, finish work despite a cancellation, and run several at once."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any, Generic, TypeVar

from rayapp.core.errors import RayappError, first_error, one_error
from rayapp.core.own_thread import Stopper, stopper_of_this_work

T = TypeVar("T")
N = TypeVar("N")
OnStop = Callable[[], None]
_on_stop: ContextVar[list[OnStop]] = ContextVar("callbacks for Ctrl-C and SIGTERM (`when_stopped`)")
log = logging.getLogger(__name__)
STDERR = 2


def run_until_done(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, with SIGTERM handled like Ctrl-C: KeyboardInterrupt comes after its
    cleanup. Signals reach only the main thread; `own_thread.Stopper` stops work in another."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        terminated = False

        async def cancelled_when_stopped() -> T:
            nonlocal terminated
            task = asyncio.current_task()
            assert task is not None
            told: list[OnStop] = []
            _on_stop.set(told)

            def on_stop() -> None:
                nonlocal terminated
                terminated = True
                _tell(told)
                task.cancel()

            if threading.current_thread() is threading.main_thread():
                loop.add_signal_handler(signal.SIGTERM, on_stop)
                with _telling_of_sigint(loop, told):
                    return await coroutine
            with _stopped_by(stopper_of_this_work(), loop, on_stop):
                return await coroutine

        try:
            return runner.run(cancelled_when_stopped())
        except asyncio.CancelledError:
            if terminated:
                raise KeyboardInterrupt from None
            raise
        except BaseExceptionGroup as group:
            raise first_error(group) from group


def _stopped_by(
    stopper: Stopper | None, loop: asyncio.AbstractEventLoop, stop: Callable[[], None]
) -> AbstractContextManager[None]:
    if stopper is None:
        return nullcontext()

    def stop_there() -> None:
        loop.call_soon_threadsafe(stop)

    return stopper.stopping(stop_there)


def when_stopped(tell: OnStop) -> None:
    """Call `tell` in the event loop when Ctrl-C or SIGTERM comes, before cleanup. Only inside `run_until_done`."""
    if (told := _on_stop.get(None)) is not None:
        told.append(tell)


def _tell(told: Sequence[OnStop]) -> None:
    for tell in told:
        tell()


@contextmanager
def _telling_of_sigint(loop: asyncio.AbstractEventLoop, told: Sequence[OnStop]) -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)

    def on_sigint(number: int, frame: FrameType | None) -> None:
        # Call the functions later, in the loop: they may print, and a print inside the signal handler could interrupt
        # another.
        loop.call_soon_threadsafe(_tell, told)
        assert callable(handler)
        handler(number, frame)

    if not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, on_sigint)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


async def finish_then_cancel(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run work that must not be left half done; a cancellation takes effect after it. A second one also ends the
    coroutine. An error after a cancellation is the cause of the CancelledError."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError as cancelled:
        try:
            await task
        except Exception as error:  # boundary: the cancellation must be raised, whatever error the work raises
            log.warning("the work that had to finish before stopping failed: %s: %s", type(error).__name__, error)
            raise cancelled from error
        raise


def is_stopping() -> bool:
    """True if the current task was cancelled, even if an error was raised in place of CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def finish_despite_cancels(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run cleanup to its end however often it is cancelled, and then raise the cancellation. Give it deadlines of its
    own.

    With `asyncio.shield` alone, a second signal would end the actors before they return their resources.
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
    """End this process with exit code 1 after this many seconds, even if it hangs; stacks go to stderr. Works also if
    the event loop is blocked, or a thread keeps the interpreter from exiting. Each call restarts the timer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


def let_process_live() -> None:
    faulthandler.cancel_dump_traceback_later()


def as_exception(error: BaseException) -> Exception:
    """Return the error; one that would end an event loop, e.g. SystemExit, as a RuntimeError."""
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


async def guarded(begin: Callable[[], Awaitable[T]], named: Callable[[BaseException], Exception] = as_exception) -> T:
    """Await code of a user or a plug-in, which may raise anything.

    `begin` starts it, under the same guard. `named` maps an error (also SystemExit, or a cancellation by the code
    itself) to the one to raise.
    """
    try:
        return await begin()
    except asyncio.CancelledError as error:
        if is_stopping():
            raise
        raise named(error) from error
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # boundary: foreign code may raise anything
        if (raised := named(error)) is error:
            raise
        raise raised from error


async def together(work: Callable[[T], Awaitable[object]], items: Iterable[T], *, at_once: int | None = None) -> None:
    """Do `work` for every item, at most `at_once` at a time. The first failure cancels the rest and is raised."""
    slots = asyncio.Semaphore(at_once) if at_once else None

    async def one(item: T) -> None:
        async with slots or nullcontext():
            await work(item)

    await side_by_side(one(item) for item in items)


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all coroutines in order. The first error cancels the others and is raised."""
    coroutines = list(work)
    if len(coroutines) == 1:
        return [await coroutines[0]]
    with one_error():
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(each) for each in coroutines]
    return [task.result() for task in running]


class News(Generic[N]):
    """Queue of items that coroutines report before they end; `every_s` is the minimum time between two batches."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._items: list[tuple[int, N]] = []
        self._is_there = asyncio.Event()

    def told(self, position: int, item: N) -> None:
        self._items.append((position, item))
        self._is_there.set()

    def taken(self) -> list[tuple[int, N]]:
        items, self._items = self._items, []
        self._is_there.clear()
        return items

    async def wait(self, *, is_first: bool) -> None:
        """Wait until there are items. Unless `is_first`, wait at least `every_s`."""
        if not is_first:
            await asyncio.sleep(self._every_s)
        await self._is_there.wait()


async def as_they_end(
    coroutines: Sequence[Coroutine[Any, Any, T]], news: News[N] | None = None
) -> AsyncIterator[list[tuple[int, T | N | Exception]]]:
    """Yield results in batches: all that finished since the last batch, as (position, result or error), after new items
    of `news`. Closing it cancels the remaining coroutines. Foreign errors become RayappErrors, which can be pickled."""
    tasks = {asyncio.ensure_future(coroutine): position for position, coroutine in enumerate(coroutines)}
    left = set(tasks)
    news = news or News[N](every_s=0.0)
    waiting = asyncio.ensure_future(news.wait(is_first=True))
    try:
        while left:
            await asyncio.wait([*left, waiting], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting = asyncio.ensure_future(news.wait(is_first=False))
            done = {task for task in left if task.done()}
            left -= done
            told: list[tuple[int, T | N | Exception]] = [*news.taken()]
            told += sorted(((tasks[task], _outcome(task)) for task in done), key=lambda pair: pair[0])
            if told:
                yield told
    finally:
        for task in (*left, waiting):
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
