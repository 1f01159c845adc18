"""Losses whose choice of tokens depends on the whole mini-batch (clip_cov, kl_cov), computed on all of it at once.

Every rank computes the same loss of the same rows, in the order of the step, from log-probs without gradient; what it
keeps is d loss / d log-prob, which its own micro-batches then push back through the model. So the result depends on
neither micro-batches nor ranks, random choices included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rayapp.config.algorithm import AlgorithmSection
from rayapp.core.types import FloatArray
from rayapp.learner.algo.advantages import response_mask
from rayapp.learner.algo.losses import LossRows, LossScale, policy_loss
from rayapp.learner.batch import TrainItem, stack_rows

Scored = tuple[TrainItem, FloatArray, FloatArray]
"""A trajectory, its log-probs now, and its log-probs at the start of the step."""


def coupled_gradients(
    scored: Sequence[Scored], algorithm: AlgorithmSection, actor_config: Any, scale: LossScale, *, seed: int
) -> dict[int, FloatArray]:
    """Gradient of the loss by log-prob, (R,) by row number; times dp_size, as every loss here is."""
    if not scored:
        return {}
    scored = sorted(scored, key=lambda entry: entry[0].row)
    items = [item for item, _, _ in scored]
    mask = response_mask(np.array([item.advantages.size for item in items]))
    width = mask.shape[1]
    log_probs = stack_rows([now for _, now, _ in scored], width).requires_grad_()
    rollout = [item.trajectory.rollout_log_probs[item.trajectory.response_mask] for item in items]
    rows = LossRows(
        log_probs=log_probs,
        old_log_probs=stack_rows([old for _, _, old in scored], width),
        rollout_log_probs=stack_rows(rollout, width),
        advantages=stack_rows([item.advantages for item in items], width),
        mask=mask,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loss = policy_loss(rows, algorithm, actor_config, scale).loss
    (slopes,) = torch.autograd.grad(loss, log_probs)
    return {item.row: slopes[i, : item.advantages.size].numpy() for i, item in enumerate(items)}
