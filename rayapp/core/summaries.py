"""Summaries of groups: the numbers that the driver keeps, while the group itself stays in the object store."""

from __future__ import annotations

import numpy as np

from rayapp.core.types import Group, GroupSummary


def summarize_group(group: Group, *, time_total_s: float) -> GroupSummary:
    """The scalars that the driver needs; see `GroupSummary`."""
    trajectories = group.trajectories
    rewards = [t.reward for t in trajectories]
    names = sorted({name for reward in rewards for name in reward.terms})
    return GroupSummary(
        group_id=group.group_id,
        task=group.prompt.task,
        rewards=np.array([r.value if r.valid else 0.0 for r in rewards], np.float32),
        valid=np.array([t.is_trainable for t in trajectories], np.bool_),
        num_tokens=np.array([t.num_tokens for t in trajectories], np.int32),
        num_response_tokens=np.array([t.num_response_tokens for t in trajectories], np.int32),
        num_prompt_tokens=int(group.prompt.token_ids.size),
        statuses=tuple(t.status.value for t in trajectories),
        reward_statuses=tuple(r.status for r in rewards),
        failure_kinds=tuple(r.failure_kind for r in rewards),
        reward_terms={name: np.array([r.terms.get(name, np.nan) for r in rewards], np.float32) for name in names},
        min_policy_version=min(t.min_policy_version for t in trajectories),
        max_policy_version=max(t.max_policy_version for t in trajectories),
        time_generate_s=max((t.time_generate_s for t in trajectories), default=0.0),
        time_score_s=sum(r.time_score_s for r in rewards),
        time_total_s=time_total_s,
        source=group.prompt.source,
    )
