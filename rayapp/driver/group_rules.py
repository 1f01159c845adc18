"""Dynamic sampling (DAPO, arXiv:2503.14476, §3.2): groups whose rewards are all equal teach nothing and are replaced.

Only the first `max_dropped_per_step` groups of a step can be refused, by their place in the order of prompts, not the
time when they finished, so that synchronous runs repeat. `FailureBudget` limits how many rollouts may fail.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from rayapp.config.algorithm import DynamicSamplingSection
from rayapp.config.config import Config
from rayapp.core.errors import TrainingAbortedError
from rayapp.core.types import FloatArray, GroupSummary

EQUAL_REWARDS = "equal_rewards"


class DynamicSampling:
    """Decides which groups are refused, and counts them between two steps."""

    def __init__(self, section: DynamicSamplingSection) -> None:
        self._section = section
        self._num_dropped = self._num_kept = 0
        self._dropped: list[GroupSummary] = []

    def refuses(self, summary: GroupSummary, place: int) -> bool:
        """Return whether to replace a group; `place` is its index among those admitted for this step, from 0."""
        if not self._section.enabled or has_signal(summary, self._section.metric):
            return False
        if place >= self._section.max_dropped_per_step:
            self._num_kept += 1
            return False
        self._num_dropped += 1
        self._dropped.append(summary)
        return True

    def take_dropped(self) -> list[GroupSummary]:
        """Return the groups dropped since the last call: they are not trained on, but their failures count."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def step_metrics(self) -> dict[str, float]:
        """Return the counts since the last call, and reset them."""
        if not self._section.enabled:
            return {}
        metrics = {
            "dynamic_sampling/dropped": float(self._num_dropped),
            "dynamic_sampling/kept_past_cap": float(self._num_kept),
        }
        self._num_dropped = self._num_kept = 0
        return metrics


def has_signal(summary: GroupSummary, metric: str = "") -> bool:
    """Return False if the group's valid rewards, or their terms `metric`, are all equal.

    A group with fewer than two valid trajectories has a signal: replacing it would hide failures, which are limited.
    """
    valid = summary.valid.astype(bool)
    values = (_term(summary, metric) if metric else summary.rewards)[valid]
    return values.size < 2 or float(np.ptp(values)) > 0.0


def _term(summary: GroupSummary, metric: str) -> FloatArray:
    """Return values (G,): 0 for answers that could not be scored and so have no terms."""
    terms = summary.reward_terms
    values = terms.get("score" if metric == "acc" and "acc" not in terms else metric)
    scored = summary.valid.astype(bool) & np.array([status == "scored" for status in summary.reward_statuses], bool)
    if values is None and not scored.any():
        return np.zeros_like(summary.rewards)
    if values is None or np.isnan(values[scored]).any():
        lacking = "no reward" if values is None else "not every reward"
        raise TrainingAbortedError(
            f"algorithm.dynamic_sampling.metric is {metric!r}, but {lacking} of task {summary.task} has this term "
            f"(terms: {', '.join(sorted(terms)) or 'none'}). Choose a term that all rewards have, or leave the key "
            "empty to compare rewards."
        )
    return np.nan_to_num(values)


WINDOW_STEPS = 10
MOST_LOST_GROUPS = 10  # that may fail as a whole between two steps; at least train.groups_per_step
GROUP_FAILED = "group_failed"


class _StepCounts(NamedTuple):
    num_groups: int
    num_failing: int  # with a failed trajectory
    num_trajectories: int
    kinds: Counter[str]  # of failed trajectories


class FailureBudget:
    """Counts trajectories that failed for reasons other than the policy, over the last ten steps."""

    def __init__(self, max_ratio: float) -> None:
        self._max_ratio = max_ratio
        self._window: deque[_StepCounts] = deque(maxlen=WINDOW_STEPS)
        self._lost: list[int] = []  # trajectories of each group that failed as a whole since the last step

    def record(self, summaries: Iterable[GroupSummary]) -> None:
        """Count one step. If the last ten steps have several groups, failures of a single group never end the run."""
        groups = [summary.failure_kinds for summary in summaries] + [(GROUP_FAILED,) * size for size in self._lost]
        self._lost = []
        self._window.append(
            _StepCounts(
                num_groups=len(groups),
                num_failing=sum(any(kinds) for kinds in groups),
                num_trajectories=sum(map(len, groups)),
                kinds=Counter(kind for kinds in groups for kind in kinds if kind),
            )
        )
        is_one_of_many = (
            sum(step.num_failing for step in self._window) == 1 < sum(step.num_groups for step in self._window)
        )
        if self.ratio > self._max_ratio and not is_one_of_many:
            raise TrainingAbortedError(
                f"{self.ratio:.0%} of the trajectories of the last {len(self._window)} step(s) failed for reasons "
                f"other than the policy ({self._described()}); rollout.max_failed_ratio is {self._max_ratio:g}. "
                "Nothing was trained on them. Find the cause with `rayapp doctor` or in trajectories/ (column "
                "reward_detail), then start the run again: it continues from its last checkpoint."
            )

    def lost_group(self, config: Config, reason: str) -> None:
        self._lost.append(config.rollout.group_size)
        if len(self._lost) > max(MOST_LOST_GROUPS, config.train.groups_per_step):
            raise TrainingAbortedError(
                f"{len(self._lost)} groups failed since the last step. The last reason: {reason} Correct the cause, "
                "then start the same command again: the run continues from its last checkpoint."
            )

    @property
    def ratio(self) -> float:
        """Share of failed trajectories over the last ten steps."""
        total = sum(step.num_trajectories for step in self._window)
        return sum(step.kinds.total() for step in self._window) / total if total else 0.0

    def _described(self) -> str:
        kinds: Counter[str] = sum((step.kinds for step in self._window), Counter())
        return ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())

    def metrics(self) -> dict[str, float]:
        return {"rollout/failed_ratio_10_steps": self.ratio}
