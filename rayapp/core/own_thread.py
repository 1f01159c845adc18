"""Run blocking work in its own thread, so that a notebook, where an event loop runs, can call it.

The caller always waits until the work has ended, also if it was stopped, so that no work is left running.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


class Stopper:
    """Stops work in another thread as Ctrl-C does in the main thread. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._is_asked = False

    def stop(self) -> None:
        """Stop the work now, or as soon as `stopping` is entered."""
        with self._lock:
            self._is_asked = True
            if self._stop is not None:
                self._stop()

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Make `Stopper.stop` call `stop` during the block; at once if it was requested before."""
        with self._lock:
            self._stop = stop
            if self._is_asked:
                stop()
        try:
            yield
        finally:
            with self._lock:
                self._stop = None


_stopper: ContextVar[Stopper | None] = ContextVar("a function that stops the work of this thread", default=None)


def stopper_of_this_work() -> Stopper | None:
    return _stopper.get()


def in_thread(
    work: Callable[[], T],
    told: Callable[[BaseException], BaseException] = lambda error: error,
    *,
    name: str = "user-code",
) -> Future[T]:
    """Start work in a daemon thread. Work that never ends blocks neither other work there nor the process's exit.

    `told` maps the work's error to the future's. Map SystemExit, which would end an asyncio process, and StopIteration,
    which asyncio's futures refuse.
    """
    future = Future[T]()

    def run() -> None:
        error, result = None, None
        try:
            result = work()
        except BaseException as raised:
            error = told(raised)
        # The caller may have cancelled the future at a deadline.
        if future.set_running_or_notify_cancel():
            future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class _WorkStoppedError(Exception):
    """Stopped work, in place of KeyboardInterrupt, which would stop the event loop that waits for it."""


def works_in_loop() -> bool:
    """True if an event loop runs in this thread, so that blocking work can't start a second loop here."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def work_apart(work: Callable[[], T]) -> T:
    """Run the work and return its result: in this thread, or in its own if an event loop runs in this one.
    KeyboardInterrupt comes after the work was stopped and has ended."""
    if not works_in_loop():
        return work()
    may_begin = threading.Event()
    stopper, result = _begun(work, may_begin)
    with _sigterm_as_ctrl_c():
        while True:
            try:
                may_begin.set()  # only inside this `try`: elsewhere a Ctrl-C would not stop the work
                return _awake_result(result)
            except KeyboardInterrupt:
                stopper.stop()
            except _WorkStoppedError:
                raise KeyboardInterrupt from None


def _awake_result(future: Future[T]) -> T:
    """Wait, waking up every second: Python's locks miss a Ctrl-C that comes just before the thread sleeps."""
    while not future.done():
        wait([future], timeout=1.0)
    return future.result()


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM, with which notebook servers end kernels, like Ctrl-C, unless the program has a handler."""
    is_main = threading.current_thread() is threading.main_thread()
    is_ours = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
        except BaseException as error:  # boundary: the caller gets the error
            result.set_exception(error)

    threading.Thread(target=copy_context().run, args=(run,), name="rayapp", daemon=True).start()
    return stopper, result


class LoopThread:
    """An event loop in its own thread, for async objects that blocking code uses. It runs from the constructor on."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. On Ctrl-C the coroutine is cancelled."""
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
