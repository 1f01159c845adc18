"""AdamW and its schedule.

The learning rate is a pure function of the optimizer step, so resuming needs no scheduler.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from rayapp.config.learner import OptimizerSection
from rayapp.learner.distributed import whole
from rayapp.learner.policy import PolicyModel


def make_optimizer(model: PolicyModel, section: OptimizerSection) -> torch.optim.AdamW:
    """Return fused AdamW with weight decay only on matrices, because norms and biases must not be pulled to 0."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def learning_rate(step: int, num_steps: int, section: OptimizerSection) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1 to `num_steps`.

    The schedule reaches its end one step after the last.

    Example: lr 1, warmup 2 of 4 steps, linear to 0 -> 0.5, 1.0, 1.0, 0.5.
    """
    if step <= section.warmup_steps:
        return section.lr * step / section.warmup_steps
    progress = (step - 1 - section.warmup_steps) / max(1, num_steps - section.warmup_steps)
    return section.lr * _decay(min(1.0, progress), section)


def _decay(progress: float, section: OptimizerSection) -> float:
    if section.schedule == "constant":
        return 1.0
    share = 1.0 - progress if section.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr_ratio + (1.0 - section.min_lr_ratio) * share


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients so that their global norm over all ranks is at most `max_norm`; return the norm before scaling.
    If a gradient is not finite, neither is the norm, and no gradient is scaled.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if torch.isfinite(norm) and norm > max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)
