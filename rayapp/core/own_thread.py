"""Blocking work in a thread of its own: called from a notebook, whose event loop runs, or awaited.

    caller's thread: work_apart(work) ------ waits; Ctrl-C -> Stopper.stop() ------> result, or what the work raised
    own thread:      work() -> run_until_done(...) -> its own event loop <- cancelled by the Stopper

Whoever waits goes on only when the work has ended, also when it is stopped: nothing is left running behind it.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Stopper:
    """Stops work in another thread as Ctrl-C would in the main one. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._is_asked = False

    def stop(self) -> None:
        """Stop what can be stopped now, or as soon as it begins."""
        with self._lock:
            self._is_asked = True
            if self._stop is not None:
                self._stop()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """What `stop` does for the length of the block; at once if it was asked before."""
        with self._lock:
            self._stop = stop
            if self._is_asked:
                stop()
        try:
            yield
        finally:
            with self._lock:
                self._stop = None


_stopper: ContextVar[Stopper | None] = ContextVar("stops what this thread does", default=None)


def stopper_of_this_work() -> Stopper | None:
    """None in work that nobody else can stop."""
    return _stopper.get()


def in_thread(work: Callable[[], T], told: Callable[[BaseException], BaseException]) -> Future[T]:
    """Code of a user's that may never end, in a daemon thread: it holds up neither others nor the process's exit.

    Args:
        told: from what the work raises to what the future holds; asyncio lets SystemExit end the process, and refuses
            StopIteration.
    """
    future = Future[T]()

    def run() -> None:
        error, result = None, None
        try:
            result = work()
        except BaseException as raised:
            error = told(raised)
        # The caller may have given up at its deadline: then nobody waits for the answer.
        if future.set_running_or_notify_cancel():
            future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name="user-code", daemon=True).start()
    return future


class _WorkStoppedError(Exception):
    """In place of KeyboardInterrupt, which an event loop would take for its own."""


def works_in_loop() -> bool:
    """True where an event loop runs in this thread, so that blocking work can't start another."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def work_apart(work: Callable[[], T]) -> T:
    """Do it in this thread if no event loop runs here, else in a thread of its own; returns when it has ended.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the work was stopped, and has ended.
    """
    if not works_in_loop():
        return work()
    may_begin = threading.Event()
    stopper, result = _begun(work, may_begin)
    with _sigterm_as_ctrl_c():
        while True:
            try:
                may_begin.set()  # not before: a Ctrl-C outside of this block would leave the work running
                return _awake_result(result)
            except KeyboardInterrupt:
                stopper.stop()
            except _WorkStoppedError:
                raise KeyboardInterrupt from None


def _awake_result(future: Future[T]) -> T:
    """The future's result; Ctrl-C comes out of the wait for it.

    Within a second where it comes in the instant before this thread sleeps: Python's locks don't wake up for it then.
    """
    while not future.done():
        wait([future], timeout=1.0)
    return future.result()


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """A notebook's server ends its kernel with SIGTERM. Where somebody answers to it already, that stays so."""
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def work_awaited(work: Callable[[], T]) -> T:
    """The same, awaited. A cancellation stops the work and takes effect when that has ended."""
    stopper, result = _begun(work)
    waiting = asyncio.wrap_future(result)
    while True:
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            stopper.stop()
            await _ended(waiting, stopper)
            raise
        except _WorkStoppedError:
            raise asyncio.CancelledError from None


def awaited(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The function in a thread of its own, to be awaited; a cancellation stops it as Ctrl-C would."""

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return await work_awaited(lambda: function(*args, **kwargs))

    call.__name__ = call.__qualname__ = f"{function.__name__}_async"
    return call


async def _ended(waiting: asyncio.Future[T], stopper: Stopper) -> None:
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            stopper.stop()  # who cancels twice will not wait for a step that has begun
    waiting.exception()  # it was stopped: what it raised is nobody's news


def _begun(work: Callable[[], T], may_begin: threading.Event | None = None) -> tuple[Stopper, Future[T]]:
    stopper, result = Stopper(), Future[T]()

    def run() -> None:
        _stopper.set(stopper)
        if may_begin is not None:
            may_begin.wait()
        try:
            result.set_result(work())
        except KeyboardInterrupt:
            result.set_exception(_WorkStoppedError())
        except BaseException as error:  # boundary: whoever waits gets it
            result.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="rayapp", daemon=True).start()
    return stopper, result


class LoopThread:
    """An event loop in a thread of its own, where what blocking code uses lives; it is running when it is made."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return _awake_result(future)
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
