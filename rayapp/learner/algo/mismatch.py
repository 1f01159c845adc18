"""How far the learner's log-probs are from the engine's: measured every step, whether corrected or not.

Called on rank 0 with the rows of all ranks. A large difference means that engine and learner compute different
policies (weights not synced, another dtype, another temperature), and that the policy gradient is biased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def mismatch_metrics(learner_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Differences in probability and verl's off-policy metrics.

    Args:
        learner_log_probs: (B, T) under the weights that should have sampled the tokens.
        rollout_log_probs: (B, T) that the engine reported.
        mask: (B, T) float32.
    Returns:
        `rollout_probs_diff/{mean,max,corr}` over tokens and `rollout_corr/*` (KL, perplexities, chi-squared).
        Empty when there is no token to compare.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics

    if not bool(mask.any()):
        return {}
    chosen = mask > 0
    learner, rollout = learner_log_probs[chosen].double().exp(), rollout_log_probs[chosen].double().exp()
    difference = (learner - rollout).abs()
    metrics = {
        "rollout_probs_diff/mean": float(difference.mean()),
        "rollout_probs_diff/max": float(difference.max()),
        "rollout_probs_diff/corr": _correlation(learner, rollout),
        "rollout_log_probs_diff/max": float((learner_log_probs - rollout_log_probs)[chosen].abs().max()),
    }
    rows = chosen.any(dim=-1)
    verl_metrics = compute_offpolicy_metrics(learner_log_probs[rows], rollout_log_probs[rows], mask[rows])
    return metrics | {f"rollout_corr/{name}": float(value) for name, value in verl_metrics.items()}


def _correlation(first: Tensor, second: Tensor) -> float:
    """Pearson correlation; 1.0 when either is constant, as there is nothing to compare then."""
    first, second = first - first.mean(), second - second.mean()
    scale = float(first.norm() * second.norm())
    return float(first @ second) / scale if scale > 0 else 1.0
