"""Where a step's wall time goes: named, non-overlapping phases of the driver that add up to the step."""

from __future__ import annotations

from collections.abc import Sequence

from rayapp.core.timing.stopwatch import Stopwatch
from rayapp.core.types import GroupSummary


class Phases(Stopwatch):
    """Times the phases of one step, from its construction on."""

    def metrics(self, summaries: Sequence[GroupSummary]) -> dict[str, float]:
        """`timing_s/*` of the phases, with what is in none of them as `timing_s/other`; tokens per second of the step.

        `timing_s/generate` and `timing_s/score` split the wait for rollouts at the moment the last completion was
        sampled: scoring overlaps generation, so only its tail is anybody's waiting time.
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
