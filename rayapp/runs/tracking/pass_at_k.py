"""pass@k of an evaluation, per data source or task: how often one of k samples at least is right. For the driver."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np

from rayapp.core.types import GroupSummary

SOLVED = "solved"


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimate for one prompt: 1 - C(n - c, k) / C(n, k), the chance that k of its n samples, drawn
    without putting back, hold a right one (Chen et al. 2021, Evaluating Large Language Models Trained on Code, eq. 1).

    Example: 4 samples, 1 right: pass@1 is 1/4, pass@2 is 1 - C(3, 2) / C(4, 2) = 1/2, pass@4 is 1.

    Args:
        k: at most num_samples.
    """
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def summarize_passes(summaries: Sequence[GroupSummary]) -> dict[str, float]:
    """`pass_at_K/NAME` for each data source or task, the mean over its prompts, for K = 1, 2, 4, … and all samples.
    Where the run has sources NAME is `SOURCE/TASK`: each may play a task in its own way.

    Samples without a verdict are left out. A prompt that has fewer than K others is not in pass@K; `pass_prompts/NAME`
    counts those that are in pass@1.
    """
    metrics: dict[str, float] = {}
    for name in sorted({_name(summary) for summary in summaries}):
        counts = [_counts(summary) for summary in summaries if _name(summary) == name]
        metrics[f"pass_prompts/{name}"] = float(sum(samples > 0 for samples, _ in counts))
        for k in ladder(max((samples for samples, _ in counts), default=0)):
            known = [pass_at_k(samples, right, k) for samples, right in counts if samples >= k]
            metrics[f"pass_at_{k}/{name}"] = float(np.mean(known))
    return metrics


def _name(summary: GroupSummary) -> str:
    return f"{summary.source}/{summary.task}" if summary.source else summary.task


def ladder(largest: int) -> list[int]:
    """1, 2, 4, … up to `largest`, and `largest` itself."""
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return sorted({*powers, largest}) if largest else []


def _counts(summary: GroupSummary) -> tuple[int, int]:
    """Samples with a verdict, and how many of them are right."""
    solved = summary.reward_terms.get(SOLVED)
    if solved is None:
        return 0, 0
    known = summary.valid & ~np.isnan(solved)
    return int(known.sum()), int((solved[known] >= 1.0).sum())
