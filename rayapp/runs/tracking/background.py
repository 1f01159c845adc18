"""Runs a tracker that talks to a service in its own thread: a server that hangs must not delay training.

Errors in the thread are raised at the next call. Records that no longer fit into the queue are refused.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rayapp.core.files import write_text
from rayapp.core.protocols import Tracker
from rayapp.core.types import Group

MAX_WAITING = 1000
MAX_WAITING_TRACES = 4  # steps whose traces wait; their groups stay in the object store meanwhile
CLOSE_TIMEOUT_S = 60.0  # until the thread takes the next record: importing a service's library takes seconds

T = TypeVar("T", bound=Tracker)


class RolloutTracer(Tracker, Protocol):
    """A tracker that also takes whole rollouts."""

    def trace(self, step: int, groups: Sequence[Group]) -> None: ...


class BackgroundTracker(Generic[T]):
    """Runs a tracker in a daemon thread. `make` makes it at the first record; it may fail, and is then retried."""

    def __init__(self, name: str, make: Callable[[int], T], *, close_timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        self._name = name
        self._make = make
        self._close_timeout_s = close_timeout_s
        self._records: queue.Queue[tuple[int, Callable[[T], None]] | None] = queue.Queue(MAX_WAITING)
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self._num_taken = 0
        # A daemon thread: a service that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass a record to the thread. Raises queue.Full, or the error of an earlier record."""
        values = dict(metrics)
        self._put(step, lambda tracker: tracker.log(step, values))

    def _put(self, step: int, work: Callable[[T], None]) -> None:
        try:
            self._records.put_nowait((step, work))
        except queue.Full:
            raise queue.Full(
                f"{self._name} is too slow or hangs: step {step} is not recorded, because {MAX_WAITING} steps already "
                "wait"
            ) from None
        self._raise_first()

    def close(self) -> None:
        """Write the waiting records; the deadline restarts with each one taken. Raises as `log`, or TimeoutError."""
        try:
            self._records.put(None, timeout=self._close_timeout_s)
        except queue.Full:
            self._raise_late()
        num_taken = -1
        while self._thread.is_alive() and self._num_taken > num_taken:
            num_taken = self._num_taken
            self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            self._raise_late()
        self._raise_first()

    def _raise_late(self) -> None:
        raise TimeoutError(
            f"{self._name} did not record the last {self._records.qsize()} steps within {self._close_timeout_s:g} s"
        )

    def _raise_first(self) -> None:
        if not self._errors.empty():
            raise self._errors.get()

    def _work(self) -> None:
        tracker: T | None = None
        while (record := self._records.get()) is not None:
            try:
                step, work = record
                tracker = tracker or self._make(step)
                work(tracker)
            except Exception as error:  # boundary: the driver's next call raises it
                self._errors.put(error)
            self._num_taken += 1
        try:
            if tracker is not None:
                tracker.close()
        except Exception as error:  # boundary: `close` raises it
            self._errors.put(error)


class BackgroundTracer(BackgroundTracker[RolloutTracer]):
    """Like `BackgroundTracker`, for a tracker that also takes rollouts."""

    def __init__(
        self, name: str, make: Callable[[int], RolloutTracer], *, close_timeout_s: float = CLOSE_TIMEOUT_S
    ) -> None:
        super().__init__(name, make, close_timeout_s=close_timeout_s)
        self._places = threading.Semaphore(MAX_WAITING_TRACES)

    def trace(self, step: int, groups: Sequence[Group]) -> None:
        """Pass the groups of a step to the thread. Raises as `log`."""
        if not self._places.acquire(blocking=False):
            raise queue.Full(
                f"{self._name} gets no traces of step {step}: it is too slow, and the traces of {MAX_WAITING_TRACES} "
                "earlier steps still wait. Lower tracking.trace_ratio."
            )

        def write(tracker: RolloutTracer) -> None:
            try:
                tracker.trace(step, groups)
            finally:
                self._places.release()

        self._put(step, write)


FILE = "trackers.json"
_STORING = threading.Lock()


def remembered_id(folder: Path, service: str, make: Callable[[], str]) -> str:
    """Return the id in `trackers.json` for a service, or make one, so that a resumed run continues in it."""
    file = folder / FILE
    try:
        kept: dict[str, str] = json.loads(file.read_text())
    except (OSError, ValueError):
        kept = {}
    if service not in kept:
        made = make()
        with _STORING:
            # Read the file again: another tracker's thread may have stored its id since.
            kept = json.loads(file.read_text()) if file.exists() else {}
            kept[service] = made
            write_text(file, json.dumps(kept, indent=1))
    return kept[service]
