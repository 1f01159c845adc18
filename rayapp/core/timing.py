"""Detect stalled work inside a process (`InHand`), and measure where time goes (`Stopwatch`, `Phases`, `Profile`).

The driver's supervision replaces a stalled process like one that hangs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.errors import StalledError
from rayapp.core.types import GroupSummary

# The learner profiles the first micro-batches of each pass, the engine its first iterations: traces stay small.
MOST_MICRO_BATCHES, MOST_ITERATIONS = 8, 64
_MAX_TRACE_BYTES = 64 << 20
_OF_FIRST_RANK = re.compile(r"rank-?0\..*trace\.json\.gz$")


class InHand:
    """Work of a process in progress. Its checks raise StalledError if the work stalls although the process answers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun: dict[int, float] = {}  # id of each piece of work -> its start time, oldest first
        self._num_begun = 0
        self._moved_at = clock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one piece of work as in progress during the block, and its success as progress."""
        self._num_begun = key = self._num_begun + 1
        self._begun[key] = self._clock()
        try:
            yield
            self.moved()
        finally:
            del self._begun[key]

    def moved(self) -> None:
        """Record progress: a token was sampled, or new weights were loaded."""
        self._moved_at = self._clock()

    def check_moves(self, limit_s: float, *, who: str, work: str) -> None:
        """Raise StalledError if there is work, and none of it made progress for `limit_s` seconds."""
        if not self._begun:
            return
        still_s = self._clock() - max(self._moved_at, self._oldest)
        if still_s >= limit_s:
            raise StalledError(
                f"{who} answers, but none of the {len(self._begun)} {work} in progress advanced for {still_s:.0f} s "
                f"(recovery.stall_replace_s = {limit_s:g})."
            )

    def check_ends(self, limit_s: float, *, who: str, work: str) -> None:
        """Raise StalledError if a piece of work has not ended within `limit_s` seconds."""
        if self._begun and (age_s := self._clock() - self._oldest) >= limit_s:
            raise StalledError(
                f"{who} answers, but one of the {len(self._begun)} {work} in progress has not ended after "
                f"{age_s:.0f} s, although rollout.group_deadline_s has passed."
            )

    @property
    def _oldest(self) -> float:
        return next(iter(self._begun.values()))


class Stopwatch:
    """Stopwatch that adds up seconds by name, in intervals that don't overlap. It runs from its construction on.

    `on_change` gets the name of each interval at its start. `synchronize` is called before its end: a GPU kernel
    continues after the call that launched it. `region` names it in a profiler's trace.
    """

    def __init__(
        self,
        *,
        on_change: Callable[[str], None] = lambda name: None,
        synchronize: Callable[[], None] = lambda: None,
        region: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._on_change = on_change
        self._synchronize = synchronize
        self._region = region
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`. Intervals must not nest."""
        self._on_change(name)
        started = time.perf_counter()
        try:
            with self._region(name):
                yield
                self._synchronize()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - started

    def seconds(self, names: tuple[str, ...] = ()) -> tuple[dict[str, float], float]:
        """Return seconds by name (0 for `names` without an interval; `other`: time in no interval), and their total."""
        total_s = time.perf_counter() - self._started
        seconds = dict.fromkeys(names, 0.0) | self._seconds
        return seconds | {"other": total_s - sum(seconds.values())}, total_s


class Phases(Stopwatch):
    """Stopwatch of one step's phases in the driver, which add up to the step."""

    def metrics(self, summaries: Sequence[GroupSummary]) -> dict[str, float]:
        """Return `timing_s/*` of the phases (`timing_s/other`: time in no phase), and tokens per second of the step.

        The wait for rollouts is `timing_s/generate` until the last completion was sampled, then `timing_s/score`:
        scoring overlaps generation until then.
        """
        seconds, step_s = self.seconds()
        num_response = sum(int(summary.num_response_tokens.sum()) for summary in summaries)
        generate_s = max((summary.time_generate_s for summary in summaries), default=0.0)
        total_s = max((summary.time_total_s for summary in summaries), default=0.0)
        return {f"timing_s/{name}": value for name, value in seconds.items()} | {
            "timing_s/step": step_s,
            "timing_s/generate": generate_s,
            "timing_s/score": max(0.0, total_s - generate_s),
            "throughput/response_tokens_per_s": num_response / step_s,
            "throughput/generated_tokens_per_s": num_response / generate_s if generate_s > 0 else 0.0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    process: str  # e.g. `learner-0`
    trace: bytes  # Chrome's, gzipped
    covers: str  # e.g. `8 of 24 micro-batches`


def read_trace(file: Path) -> bytes:
    """Return a trace file's bytes. ValueError: it is too large to be kept."""
    if (size := file.stat().st_size) > _MAX_TRACE_BYTES:
        raise ValueError(
            f"the trace is too large: it has {size >> 20} MiB, and the maximum is {_MAX_TRACE_BYTES >> 20} MiB"
        )
    return file.read_bytes()


def take_engine_trace(folder: Path) -> bytes:
    """Return the trace of an engine's first rank, and delete the files that vLLM wrote. ValueError: there is none."""
    try:
        return read_trace(max(path for path in folder.iterdir() if _OF_FIRST_RANK.search(path.name)))
    finally:
        for path in folder.iterdir():
            path.unlink(missing_ok=True)
