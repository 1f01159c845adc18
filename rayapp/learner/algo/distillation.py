"""On-policy distillation: what a teacher's distribution is worth to the policy, on tokens that the policy sampled.

Called by `log_probs` a chunk of positions at a time, where the whole distribution counts, and by the step, where the
sampled tokens alone do. On-policy distillation with either KL: arXiv:2306.13649 (GKD) and, for the reverse one,
arXiv:2306.08543 (MiniLLM). The log-ratio of a sampled token as its advantage, without a discount, is the form of
Thinking Machines' "On-Policy Distillation" (2025). Nothing here reads the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayapp.config.distillation import DistillationSection

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""Of the forward KL's weights, which are exponentials, where the config sets no limit."""
_LOG_OF_NOTHING = -87.0
"""Log-prob of outcomes that float32 has no probability for."""


def teacher_advantages(teacher: Tensor, old: Tensor, section: DistillationSection) -> Tensor:
    """Advantages by which a policy gradient lowers the KL to the teacher, in expectation over what was sampled.

    Args:
        teacher, old: log-probs of the sampled tokens, under the teacher and under the policy that takes the step.
    Returns:
        For the reverse KL log q - log p; for the forward one q / p - 1, whose gradient is that of the k3 estimator.
        Without the weight; no gradient goes through.
    """
    log_ratio = (teacher - old).detach()
    limit = section.max_log_ratio
    if section.kl == "reverse":
        return log_ratio if limit is None else log_ratio.clamp(-limit, limit)
    limit = limit or LARGEST_LOG_RATIO
    return log_ratio.clamp(-limit, limit).expm1()


def kl(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """The KL at each of C positions, (C,).

    Args:
        log_p, log_q: (C, V) of the policy and of the teacher.
    """
    log_q = _told_apart(log_p, log_q, section)
    above, below = (log_p, log_q) if section.kl == "reverse" else (log_q, log_p)
    return (above.exp() * (above - below)).sum(-1)


def kl_gradient(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """The gradient of `kl` by the policy's logits, (C, V): reverse p (log p - log q - KL), forward p - q."""
    log_q = _told_apart(log_p, log_q, section)
    if section.kl == "forward":
        return log_p.exp() - log_q.exp()
    p, log_ratio = log_p.exp(), log_p - log_q
    return (log_ratio - (p * log_ratio).sum(-1, keepdim=True)).mul_(p)


def _told_apart(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """The teacher's log-probs, (C, V), as far as the KL tells tokens apart.

    With `top_k` all but the top k are one outcome. That is the same, in value and gradient, as if the teacher dealt the
    probability of that outcome out as the policy does.
    """
    if section.kl_over != "top_k" or section.top_k >= log_p.shape[-1]:
        return log_q
    top = (log_p if section.kl == "reverse" else log_q).topk(section.top_k, dim=-1).indices
    rest_p, rest_q = (
        log.scatter(-1, top, float("-inf")).logsumexp(-1, keepdim=True).clamp_min(_LOG_OF_NOTHING)
        for log in (log_p, log_q)
    )
    return (log_p + (rest_q - rest_p)).scatter(-1, top, log_q.gather(-1, top))
