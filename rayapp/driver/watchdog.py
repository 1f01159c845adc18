"""Notices when a run makes no progress although every process answers: says who waits for what, then stops the run.

One `Watchdog` in the driver. A process that is gone or hangs is `supervision`'s; this is for what no deadline of a
single call catches: two parts that wait for each other, a disk that never answers. The driver's waits run in it one by
one, each in the task that waits, so that a stop ends what hangs and not somebody who waits for it.
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

MAX_SHOWN = 20
"""Waits that a report lists; the longest ones."""
DUMP_S = 120.0
"""How long writing the stacks may take: a disk that hangs takes none."""
LEAVE_S = 1200.0
"""From the stop to the end of the process: what can be saved is saved (`rayapp.driver.saving.SAVE_S`), the actors
end."""


@dataclass(frozen=True, slots=True)
class _Wait:
    role: str
    what: str
    since_s: float


class Watchdog:
    """See the module.

    Args:
        report_after_s: without progress, until it says who waits for what; again after as long.
        stop_after_s: without progress, until it stops the run.
        report: gets a line.
        dump_stacks: where every process is, and the name of the file it was written to.
        clock: in seconds.
        leave_s: after a stop, or while the event loop does not run, until the process is ended by force.
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
        """Something was finished: a group, a phase of a step."""
        self._progress_at = self._clock()
        self._last = what

    @contextmanager
    def waiting(self, role: str, what: str) -> Iterator[None]:
        """`role` waits for `what` while the block runs; leaving it in order is progress."""
        wait = _Wait(role, what, self._clock())
        self._waits[id(wait)] = wait
        try:
            yield
            self.progress(f"{role}: {what}")
        finally:
            del self._waits[id(wait)]

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while the block runs.

        Raises:
            StalledError: nothing was finished for stop_after_s. From the block, in an exception group.
        """
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
            # Set anew as long as the event loop runs: else nothing in it could say that it does not.
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
        what = f"nothing was finished for {stalled_s:.0f} s (recovery.stall_stop_s = {self._stop_after_s:g})."
        self._report(f"{what} {self.describe()} The run stops.")
        raise StalledError(
            f"{what} {self.describe()} {await self._dumped()} If a step honestly takes that long, raise "
            "recovery.stall_stop_s; else start the run again: it goes on from its last checkpoint."
        )

    async def _dumped(self) -> str:
        try:
            async with asyncio.timeout(DUMP_S):
                return f"The stacks of all processes are in {await self._dump_stacks()}."
        except Exception as error:  # boundary: what hangs may be what they need
            return f"The stacks could not be written ({type(error).__name__}: {error})."

    def describe(self) -> str:
        """Who waits for what, longest first."""
        now = self._clock()
        waits = sorted(self._waits.values(), key=lambda wait: wait.since_s)
        shown = "; ".join(f"{w.role} for {w.what} since {now - w.since_s:.0f} s" for w in waits[:MAX_SHOWN])
        more = f"; and {len(waits) - MAX_SHOWN} more" if len(waits) > MAX_SHOWN else ""
        return f"Waiting: {shown or 'nobody'}{more}. Last finished: {self._last}."


def stacks_of_this_process() -> str:
    """Where each thread of this process is now."""
    frames = sys._current_frames().items()  # noqa: SLF001 - documented for this, whatever its name says
    return "\n".join(f"=== driver, thread {ident}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames)


@asynccontextmanager
async def unstalled(watchdog: Watchdog, what: str) -> AsyncIterator[None]:
    """Stop the block, in which the driver waits for `what`, when nothing goes on in the run.

    Raises:
        StalledError: with who waits for what.
    """
    with one_error(), watchdog.waiting("driver", what):
        async with watchdog.watching():
            yield
