"""The advantage each trajectory of a group was worth, worked out again from the recorded rewards. Pure.

The learner's own numbers aren't recorded. For GRPO they follow from the group alone; for any other estimator the page
shows the reward over the group's mean, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """The advantages of one group's trajectories.

    Example: rewards 1 and 0 under grpo -> mean 0.5, standard deviation 0.7071, values (0.7071, -0.7071).
    """

    label: str
    values: tuple[float | None, ...]
    """(G,) None where the trajectory is in no loss."""


def group_advantages(rewards: Sequence[float], valid: Sequence[bool], algorithm: Mapping[str, Any]) -> Advantages:
    """(r - mean) / (std + 1e-6) of verl's grpo, with the sample standard deviation; without the division as Dr. GRPO.

    A group with one valid trajectory has mean 0 and deviation 1 there, so its advantage is its reward.
    """
    of_valid = [reward for reward, is_valid in zip(rewards, valid, strict=True) if is_valid]
    is_grpo = algorithm.get("adv_estimator", "grpo") == "grpo"
    mean = fmean(of_valid) if len(of_valid) > 1 or (of_valid and not is_grpo) else 0.0
    divides = is_grpo and algorithm.get("norm_adv_by_std", True)
    scale = (stdev(of_valid) if len(of_valid) > 1 else 1.0) + _EPSILON if divides else 1.0
    values = tuple((r - mean) / scale if is_valid else None for r, is_valid in zip(rewards, valid, strict=True))
    return Advantages(label="advantage (grpo)" if is_grpo else "reward − group mean", values=values)
