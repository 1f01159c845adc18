"""Log-probs of a group under the learner's weights: what a server that holds the same weights must agree with."""

from __future__ import annotations

import numpy as np

from rayapp.core.types import FloatArray, Group
from rayapp.learner.batch import TrainItem
from rayapp.learner.step import PolicyLearner


def log_probs_of(learner: PolicyLearner, group: Group) -> list[FloatArray]:
    """(R_i,) log-probs of each trajectory, in order; empty where it has no response token. Collective."""
    items = [
        TrainItem(row=i, group=0, trajectory=t, advantages=np.zeros(t.num_response_tokens, np.float32))
        for i, t in enumerate(group.trajectories)
        if t.num_response_tokens > 0
    ]
    scores = learner.score(items, learner.model, learner.head_options())
    empty = np.zeros(0, np.float32)
    return [scores[i].log_probs if i in scores else empty for i in range(len(group.trajectories))]
