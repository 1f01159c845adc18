"""Summaries of groups for tests, without sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayapp.core.types import FloatArray, GroupSummary


def summary_of(rewards: Sequence[float] | FloatArray, **fields: Any) -> GroupSummary:
    """Return the summary of a group with these rewards, all valid and scored, each with one prompt token and one
    response token.

    Args:
        fields: values of `GroupSummary` to replace.
    """
    size = len(rewards)
    usual: dict[str, Any] = {
        "group_id": 0,
        "task": "t",
        "rewards": np.array(rewards, np.float32),
        "valid": np.ones(size, np.bool_),
        "num_tokens": np.full(size, 2, np.int32),
        "num_response_tokens": np.ones(size, np.int32),
        "num_prompt_tokens": 1,
        "statuses": ("completed",) * size,
        "reward_statuses": ("scored",) * size,
        "failure_kinds": ("",) * size,
        "reward_terms": {},
        "min_policy_version": 0,
        "max_policy_version": 0,
        "time_generate_s": 0.0,
        "time_score_s": 0.0,
        "time_total_s": 0.0,
    }
    return GroupSummary(**usual | fields)
