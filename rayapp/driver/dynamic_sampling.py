"""Dynamic sampling (DAPO, arXiv:2503.14476, §3.2): groups whose rewards are all equal teach nothing and are replaced.

The store asks about every finished group; a group that is refused is dropped in its ledger, and its slot goes to the
next prompt. Only the first `algorithm.dynamic_sampling.max_dropped_per_step` groups of a step can be refused: later
ones are trained on, where they weigh nothing. Which group is refused follows from its place in the order of prompts and
not from when it was finished, so that synchronous runs repeat. Pure counting.
"""

from __future__ import annotations

import numpy as np

from rayapp.config.algorithm import DynamicSamplingSection
from rayapp.core.types import GroupSummary

EQUAL_REWARDS = "equal_rewards"


class DynamicSampling:
    """Counts what is refused between two steps."""

    def __init__(self, section: DynamicSamplingSection) -> None:
        self._section = section
        self._num_dropped = self._num_kept = 0
        self._dropped: list[GroupSummary] = []

    def refuses(self, summary: GroupSummary, place: int) -> bool:
        """Whether this group is to be replaced.

        Args:
            place: of the group among those admitted for this step, from 0.
        """
        if not self._section.enabled or has_signal(summary):
            return False
        if place >= self._section.max_dropped_per_step:
            self._num_kept += 1
            return False
        self._num_dropped += 1
        self._dropped.append(summary)
        return True

    def take_dropped(self) -> list[GroupSummary]:
        """What was dropped since the last call: nobody trains on it, but the failures in it count."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def step_metrics(self) -> dict[str, float]:
        """Counts since the step before, which this call ends."""
        if not self._section.enabled:
            return {}
        metrics = {
            "dynamic_sampling/dropped": float(self._num_dropped),
            "dynamic_sampling/kept_past_cap": float(self._num_kept),
        }
        self._num_dropped = self._num_kept = 0
        return metrics


def has_signal(summary: GroupSummary) -> bool:
    """False when the group's valid rewards are all equal.

    A group without two valid trajectories has no signal either, but says so through failures, which have a budget of
    their own (rollout.max_failed_ratio): replacing it here would hide them.
    """
    rewards = summary.rewards[summary.valid.astype(bool)]
    return rewards.size < 2 or float(np.ptp(rewards)) > 0.0
