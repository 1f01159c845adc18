"""Detects that a run makes no progress although every process answers; reports all waits, then stops the run.

It is for stalls that no deadline of a single call catches, such as two parts that wait for each other. Every wait of
the driver is recorded by the task that waits, so that stopping the run cancels the hanging wait.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rayapp.core.aio import end_process_after, let_process_live
from rayapp.core.errors import StalledError, one_error

MAX_SHOWN = 20  # waits in a report, longest first
DUMP_S = 120.0  # for writing the stacks, in case the disk hangs
LEAVE_S = 1200.0  # from the stop to the end of the process, for saving (`saving.SAVE_S`) and ending actors


@dataclass(frozen=True, slots=True)
class _Wait:
    role: str
    what: str
    since_s: float


class Watchdog:
    """Reports and ends stalls, after seconds without progress.

    `dump_stacks` writes the stacks of every process, and returns the name of the file. After `leave_s` the process is
    ended by force, after a stop or while the event loop does not run.
    """

    def __init__(
        self,
        *,
        report_after_s: float,
        stop_after_s: float,
        report: Callable[[str], None],
        dump_stacks: Callable[[], Awaitable[str]],
        clock: Callable[[], float] = time.monotonic,
        leave_s: float = LEAVE_S,
    ) -> None:
        self._leave_s = leave_s
        self._report_after_s = report_after_s
        self._stop_after_s = stop_after_s
        self._report = report
        self._dump_stacks = dump_stacks
        self._clock = clock
        self._waits: dict[int, _Wait] = {}
        self._progress_at = clock()
        self._last = "the start"
        self._has_stalled = False

    def progress(self, what: str) -> None:
        """Record progress: a group or a phase of a step has finished."""
        self._progress_at = self._clock()
        self._last = what

    @contextmanager
    def waiting(self, role: str, what: str) -> Iterator[None]:
        """Record in the block that `role` waits for `what`; its success is progress."""
        wait = _Wait(role, what, self._clock())
        self._waits[id(wait)] = wait
        try:
            yield
            self.progress(f"{role}: {what}")
        finally:
            del self._waits[id(wait)]

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the block. StalledError, in a group: nothing was finished for stop_after_s."""
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch(), name="stall watchdog")
            try:
                yield
            finally:
                watch.cancel()
                if not self._has_stalled:
                    let_process_live()

    async def _watch(self) -> None:
        reported_at = self._progress_at
        while True:
            # Postpone the forced end as long as the event loop runs; a loop that hangs can't report itself.
            end_process_after(self._stop_after_s + self._leave_s)
            await asyncio.sleep(min(self._report_after_s, self._stop_after_s) / 10)
            now = self._clock()
            stalled_s = now - self._progress_at
            if stalled_s >= self._stop_after_s:
                await self._stop(stalled_s)
            if now - max(reported_at, self._progress_at) >= self._report_after_s:
                reported_at = now
                self._report(f"no progress for {stalled_s:.0f} s. {self.describe()}")

    async def _stop(self, stalled_s: float) -> None:
        self._has_stalled = True
        end_process_after(self._leave_s)
        what = f"no group or phase was finished for {stalled_s:.0f} s (recovery.stall_stop_s = {self._stop_after_s:g})."
        self._report(f"{what} {self.describe()} The run stops.")
        raise StalledError(
            f"{what} {self.describe()} {await self._dumped()} If a step really takes that long, raise "
            "recovery.stall_stop_s; otherwise start the run again: it continues from its last checkpoint."
        )

    async def _dumped(self) -> str:
        try:
            async with asyncio.timeout(DUMP_S):
                return f"The stacks of all processes are in {await self._dump_stacks()}."
        except Exception as error:  # the run's fault may also break writing the stacks
            return f"The stacks could not be written ({type(error).__name__}: {error})."

    def describe(self) -> str:
        """Describe all waits, longest first."""
        now = self._clock()
        waits = sorted(self._waits.values(), key=lambda wait: wait.since_s)
        shown = "; ".join(f"{w.role} for {w.what} since {now - w.since_s:.0f} s" for w in waits[:MAX_SHOWN])
        more = f"; and {len(waits) - MAX_SHOWN} more" if len(waits) > MAX_SHOWN else ""
        return f"Waiting: {shown or 'nothing'}{more}. Last finished: {self._last}."


def stacks_of_this_process() -> str:
    frames = sys._current_frames().items()  # noqa: SLF001 - documented for this, whatever its name says
    return "\n".join(f"=== driver, thread {ident}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)


@asynccontextmanager
async def unstalled(watchdog: Watchdog, what: str) -> AsyncIterator[None]:
    """Wait for `what` in the block, which StalledError stops if the run makes no progress."""
    with one_error(), watchdog.waiting("driver", what):
        async with watchdog.watching():
            yield
