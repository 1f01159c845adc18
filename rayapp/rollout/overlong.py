"""DAPO's soft overlong punishment (arXiv:2503.14476, §3.4) in training; as in verl, tool results count towards the
length."""

from __future__ import annotations

from dataclasses import replace

from rayapp.config.algorithm import OverlongSection
from rayapp.core.trajectories import branches, summarize_group
from rayapp.core.types import Group, GroupSummary, Trajectory

PENALTY_TERM = "overlong_penalty"


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return the term to add to the reward: 0 up to `max_tokens - buffer_tokens`, then linearly down to -penalty.

    Example: with max_tokens 120, buffer_tokens 20 and penalty 1, the terms for 90, 100, 110 and 120 tokens are 0, 0,
    -0.5 and -1.
    """
    if buffer_tokens == 0:
        return 0.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(1.0, max(0.0, excess / buffer_tokens))


def shape_group(
    group: Group, summary: GroupSummary, overlong: OverlongSection, max_tokens: int
) -> tuple[Group, GroupSummary]:
    """Add the overlong penalty to the rewards of a group as a term, if it is configured."""
    if overlong.buffer_tokens == 0:
        return group, summary
    shaped = replace(group, trajectories=tuple(_shaped(t, overlong, max_tokens) for t in group.trajectories))
    return shaped, summarize_group(shaped, time_total_s=summary.time_total_s)


def _response_tokens(trajectory: Trajectory) -> int:
    """Count tokens in the longest branch; each branch is a separate conversation."""
    sampled = (trajectory.response_mask[branch] for branch in branches(trajectory.num_tokens, trajectory.forks))
    return max(mask.size - int(mask.argmax()) if mask.any() else 0 for mask in sampled)


def _shaped(trajectory: Trajectory, section: OverlongSection, max_tokens: int) -> Trajectory:
    if not trajectory.reward.valid:
        return trajectory
    reward = trajectory.reward
    change = overlong_penalty(
        _response_tokens(trajectory),
        max_tokens=max_tokens,
        buffer_tokens=section.buffer_tokens,
        penalty=section.penalty,
    )
    terms = reward.terms | {PENALTY_TERM: change}
    return replace(trajectory, reward=replace(reward, value=reward.value + change, terms=terms))
