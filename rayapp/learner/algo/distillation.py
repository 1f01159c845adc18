"""On-policy distillation: the KL between policy and teacher on tokens that the policy sampled.

Forward and reverse KL: arXiv:2306.13649 (GKD), arXiv:2306.08543 (MiniLLM); the log-ratio of a sampled token as its
advantage: Thinking Machines' "On-Policy Distillation" (2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayapp.config.other_models import DistillationSection

if TYPE_CHECKING:
    from torch import Tensor


LARGEST_LOG_RATIO = 20.0  # of the log-ratios that the forward KL exponentiates


def teacher_advantages(teacher: Tensor, old: Tensor, section: DistillationSection) -> Tensor:
    """Return advantages with which a policy gradient lowers the KL to the teacher, without gradient.

    Reverse KL: log q - log p; forward KL: q / p - 1, the gradient of the k3 estimator; times the section's weight.
    `teacher` and `old` are log-probs of the sampled tokens.
    """
    log_ratio = (teacher - old).detach()
    limit = section.max_log_ratio
    if section.kl == "reverse":
        return section.weight * (log_ratio if limit is None else log_ratio.clamp(-limit, limit))
    limit = limit or LARGEST_LOG_RATIO
    return section.weight * log_ratio.clamp(-limit, limit).expm1()


def kl(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """Return the KL at each of C positions, (C,), from log-probs (C, V)."""
    above, below = (log_p, log_q) if section.kl == "reverse" else (log_q, log_p)
    return (above.exp() * (above - below)).sum(-1)


def kl_gradient(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """Return the gradient of `kl` for the policy's logits, (C, V). Reverse: p (log p - log q - KL); forward: p - q."""
    if section.kl == "forward":
        return log_p.exp() - log_q.exp()
    p, log_ratio = log_p.exp(), log_p - log_q
    return (log_ratio - (p * log_ratio).sum(-1, keepdim=True)).mul_(p)
