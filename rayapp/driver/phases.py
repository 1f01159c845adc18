"""Where a step's wall time goes: named, non-overlapping phases of the driver that add up to the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rayapp.core.types import GroupSummary


class Phases:
    """Times the phases of one step, from its construction on.

    Args:
        on_change: told the name of each phase as it starts, for the live display.
    """

    def __init__(self, on_change: Callable[[str], None] = lambda name: None) -> None:
        self._on_change = on_change
        self._started = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._on_change(name)
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

    def metrics(self, summaries: Sequence[GroupSummary]) -> dict[str, float]:
        """`timing_s/*` of the phases, with what is in none of them as `timing_s/other`; tokens per second of the step.

        `timing_s/generate` and `timing_s/score` split the wait for rollouts at the moment the last completion was
        sampled: scoring overlaps generation, so only its tail is anybody's waiting time.
        """
        step_s = time.monotonic() - self._started
        timings = {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}
        timings["timing_s/other"] = step_s - sum(self._seconds.values())
        timings["timing_s/step"] = step_s
        num_response = sum(int(summary.num_response_tokens.sum()) for summary in summaries)
        generate_s = max((summary.time_generate_s for summary in summaries), default=0.0)
        total_s = max((summary.time_total_s for summary in summaries), default=0.0)
        return timings | {
            "timing_s/generate": generate_s,
            "timing_s/score": max(0.0, total_s - generate_s),
            "throughput/response_tokens_per_s": num_response / step_s,
            "throughput/generated_tokens_per_s": num_response / generate_s if generate_s > 0 else 0.0,
        }
