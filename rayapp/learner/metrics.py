"""Numbers of one step from the facts of all ranks. Every name says what it rests on; nothing is averaged over ranks.

Log-probs, entropy and the difference to the engine are measured on the trajectories that were computed; those skipped
because their advantages are all zero are counted in `learner/share_computed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayapp.config.algorithm import AlgorithmSection
from rayapp.core.timing.stopwatch import Stopwatch
from rayapp.core.types import FloatArray
from rayapp.learner.algo.advantages import response_mask
from rayapp.learner.algo.mismatch import mismatch_metrics
from rayapp.learner.batch import stack_rows
from rayapp.learner.step_plan import StepTable

STRETCHES = ("prepare", "old_log_probs", "ref", "teacher", "forward_backward", "optimizer", "metrics")
"""Of a step's time on a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchFacts:
    """Counts and losses of one micro-batch."""

    num_computed_tokens: int
    """Unique tokens that went through the model."""
    num_input_tokens: int
    """Tokens that would have gone through the model without shared prefixes."""
    num_trained_tokens: int
    loss: float
    """Its share of the mini-batch's loss: shares add up."""
    metrics: dict[str, float]
    """verl's metrics, each a mean over the micro-batch's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Numbers of one trajectory's R response tokens, each (R,)."""

    log_probs: FloatArray
    """Log-probs in the update that trained on it."""
    old_log_probs: FloatArray
    """Log-probs at the start of the step."""
    rollout_log_probs: FloatArray
    entropy: FloatArray
    ref_log_probs: FloatArray | None
    teacher_kl: FloatArray | None
    """KL to the teacher: over all tokens it tells apart, or log p - log q of the sampled one."""


def step_metrics(
    micro: Sequence[MicroBatchFacts], rows: Mapping[int, RowFacts], table: StepTable, algorithm: AlgorithmSection
) -> dict[str, float]:
    """All metrics but those of the optimizer and the clock. Keys are missing where nothing was computed."""
    computed = sum(fact.num_computed_tokens for fact in micro)
    inputs = sum(fact.num_input_tokens for fact in micro)
    num_trained = int(table.num_response_tokens[table.loss_rows].sum())
    num_computed = sum(fact.num_trained_tokens for fact in micro)
    metrics = {
        "learner/loss": float(sum(fact.loss for fact in micro)),
        "learner/num_microbatches": float(len(micro)),
        "learner/tokens_computed": float(computed),
        "learner/tokens_trained": float(num_trained),
        "learner/tokens_shared": float(inputs - computed),
        "learner/share_computed": num_computed / num_trained if num_trained else 0.0,
        "learner/num_trajectories": float(table.loss_rows.size),
        "learner/overlong_filtered": float((table.trained & table.filtered).sum()),
        "learner/zero_variance_groups": zero_variance_share(table),
    }
    return metrics | _verl_means(micro) | _row_metrics(rows, algorithm)


def zero_variance_share(table: StepTable) -> float:
    """Share of groups whose trained rewards are all equal: they teach nothing. 0 when no group is trained on."""
    equal = [
        float(np.ptp(table.rewards[chosen]) == 0.0)
        for group in range(table.num_groups)
        if (chosen := (table.group == group) & table.trained).any()
    ]
    return float(np.mean(equal)) if equal else 0.0


def _verl_means(micro: Sequence[MicroBatchFacts]) -> dict[str, float]:
    """Each of verl's metrics, weighted by tokens."""
    names = sorted({name for fact in micro for name in fact.metrics})
    result: dict[str, float] = {}
    for name in names:
        having = [(fact.num_trained_tokens, fact.metrics[name]) for fact in micro if name in fact.metrics]
        total = sum(weight for weight, _ in having)
        result[f"learner/{name}"] = sum(weight * value for weight, value in having) / max(1, total)
    return result


def _row_metrics(rows: Mapping[int, RowFacts], algorithm: AlgorithmSection) -> dict[str, float]:
    if not rows:
        return {}
    ordered = [rows[row] for row in sorted(rows)]
    entropy = np.concatenate([row.entropy for row in ordered])
    now, old = (np.concatenate([getattr(row, name) for row in ordered]) for name in ("log_probs", "old_log_probs"))
    ratio = np.exp(np.clip(now - old, -20.0, 20.0))
    metrics = {
        "learner/entropy": float(entropy.mean()),
        "learner/ratio_mean": float(ratio.mean()),
        "learner/ratio_max": float(ratio.max()),
        "learner/ratio_min": float(ratio.min()),
    }
    if ordered[0].ref_log_probs is not None:
        metrics["learner/kl_to_reference"] = _reference_kl(ordered)
    if ordered[0].teacher_kl is not None:
        kl = np.concatenate([row.teacher_kl for row in ordered if row.teacher_kl is not None])
        metrics |= {"distillation/kl": float(kl.mean()), "distillation/kl_max": float(kl.max())}
    return metrics | _mismatch(ordered)


def _reference_kl(rows: Sequence[RowFacts]) -> float:
    """k3 estimate of KL(policy || reference), whatever the loss uses: it is never negative."""
    log_ratio = np.concatenate([row.ref_log_probs - row.log_probs for row in rows if row.ref_log_probs is not None])
    return float((np.exp(np.clip(log_ratio, -20.0, 20.0)) - log_ratio - 1.0).mean())


def _mismatch(rows: Sequence[RowFacts]) -> dict[str, float]:
    lengths = np.array([row.old_log_probs.size for row in rows])
    mask = response_mask(lengths)
    learner, rollout = (
        stack_rows([getattr(row, name) for row in rows], mask.shape[1])
        for name in ("old_log_probs", "rollout_log_probs")
    )
    return mismatch_metrics(learner, rollout, mask)


def timing_metrics(watch: Stopwatch) -> dict[str, float]:
    """`timing_s/learner/*`; all but `total` add up to `total`."""
    seconds, total_s = watch.seconds(STRETCHES)
    return {f"timing_s/learner/{name}": value for name, value in {**seconds, "total": total_s}.items()}
