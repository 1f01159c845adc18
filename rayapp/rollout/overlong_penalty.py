"""Changes of rewards that follow from a trajectory's length: DAPO's soft overlong punishment (arXiv:2503.14476, §3.4).

Called by the rollout worker on every group of training, never on evaluation. Off unless
`algorithm.overlong.buffer_tokens` is set. Length is what `rollout.max_completion_tokens` limits, as in verl: everything
after the prompt, tool results included.
"""

from __future__ import annotations

from dataclasses import replace

from rayapp.config.config import Config
from rayapp.core.summaries import summarize_group
from rayapp.core.types import Group, GroupSummary, Trajectory

PENALTY_TERM = "overlong_penalty"


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """What is added to the reward: 0 up to `max_tokens - buffer_tokens`, then linearly to -penalty at `max_tokens`.

    Example: 90, 100, 110 and 120 tokens of at most 120, buffer 20, penalty 1 -> 0, 0, -0.5, -1.
    """
    if buffer_tokens == 0:
        return 0.0
    excess = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(1.0, max(0.0, excess / buffer_tokens))


def shape_group(group: Group, summary: GroupSummary, config: Config) -> tuple[Group, GroupSummary]:
    """The group with the penalty in its rewards, as a term of its own; as it is where none is configured."""
    if config.algorithm.overlong.buffer_tokens == 0:
        return group, summary
    num_prompt_tokens = group.prompt.token_ids.size
    shaped = replace(
        group,
        trajectories=tuple(_shaped(t, t.num_tokens - num_prompt_tokens, config) for t in group.trajectories),
    )
    return shaped, summarize_group(shaped, time_total_s=summary.time_total_s)


def _shaped(trajectory: Trajectory, num_tokens: int, config: Config) -> Trajectory:
    if not trajectory.reward.valid:
        return trajectory
    section, reward = config.algorithm.overlong, trajectory.reward
    change = overlong_penalty(
        num_tokens,
        max_tokens=config.rollout.max_completion_tokens,
        buffer_tokens=section.buffer_tokens,
        penalty=section.penalty,
    )
    terms = reward.terms | {PENALTY_TERM: change}
    return replace(trajectory, reward=replace(reward, value=reward.value + change, terms=terms))
