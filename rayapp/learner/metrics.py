"""Computes the metrics of one step on rank 0, from the facts of all ranks. No metric is an average of ranks' averages.

The difference between the learner's and the engine's log-probs is measured every step: if it is large, they compute
different policies (weights not synced, other dtypes or temperatures), and the policy gradient is biased.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from rayapp.config.config import Config
from rayapp.config.other_models import DistillationSection
from rayapp.core.errors import InputError
from rayapp.core.timing import MOST_MICRO_BATCHES, Profile, Stopwatch, read_trace
from rayapp.core.types import FloatArray
from rayapp.learner.algo.advantages import response_mask
from rayapp.learner.algo.losses import LossRows
from rayapp.learner.batch import MicroBatch, stack_rows
from rayapp.learner.memory.shape import Gpu, ModelShape, gpu_here, model_shape
from rayapp.learner.memory.speed import attention_flops, product_flops
from rayapp.learner.step_plan import StepTable

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


def mismatch_metrics(learner_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, float]:
    """Compare log-probs (B, T) under the weights that should have sampled the tokens with the engine's:
    `rollout_probs_diff/{mean,max,corr}` over tokens and `rollout_corr/*` (KL, perplexities, chi-squared)."""
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
    # Pearson; 1.0 if either tensor is constant
    first, second = first - first.mean(), second - second.mean()
    scale = float(first.norm() * second.norm())
    return float(first @ second) / scale if scale > 0 else 1.0


# Parts of a step on a rank.
STRETCHES = ("prepare", "old_log_probs", "ref", "teacher", "forward_backward", "optimizer", "metrics")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchFacts:
    num_computed_tokens: int  # unique tokens that went through the model
    num_input_tokens: int  # without shared prefixes
    num_trained_tokens: int
    num_heads: int  # positions whose logits were computed
    num_attended: int  # pairs of a token and a token that it attends to
    num_input_attended: int  # without shared prefixes
    num_picture_tokens: int  # for whose pictures the vision tower was run
    loss: float  # part of the mini-batch's; the parts add up
    metrics: dict[str, float]  # verl's, each a mean over tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """Values for each of a trajectory's R response tokens, (R,)."""

    log_probs: FloatArray  # during the optimizer step that trained on the trajectory
    old_log_probs: FloatArray  # at the start of the step
    rollout_log_probs: FloatArray
    entropy: FloatArray
    ref_log_probs: FloatArray | None
    teacher_kl: FloatArray | None  # over the whole vocabulary, or log p - log q of the sampled tokens


def row_facts(batch: MicroBatch, rows: LossRows) -> dict[int, RowFacts]:
    """Copy the values from which metrics are computed to the host, by row."""
    log_probs, old = rows.log_probs.detach().cpu().numpy(), rows.old_log_probs.cpu().numpy()
    entropy = rows.entropy.detach().cpu().numpy() if rows.entropy is not None else np.zeros_like(old)
    ref = rows.ref_log_probs.cpu().numpy() if rows.ref_log_probs is not None else None
    teacher_kl = rows.teacher_kl.detach().cpu().numpy() if rows.teacher_kl is not None else None
    return {
        item.row: RowFacts(
            log_probs=log_probs[i, : item.advantages.size],
            old_log_probs=old[i, : item.advantages.size],
            rollout_log_probs=item.rollout_log_probs,
            entropy=entropy[i, : item.advantages.size],
            ref_log_probs=None if ref is None else ref[i, : item.advantages.size],
            teacher_kl=None if teacher_kl is None else teacher_kl[i, : item.advantages.size],
        )
        for i, item in enumerate(batch.items)
    }


def step_metrics(
    micro: Sequence[MicroBatchFacts], rows: Mapping[int, RowFacts], table: StepTable, teaching: DistillationSection
) -> dict[str, float]:
    """Return all metrics but the optimizer's and the timings. One is missing if its values were not computed."""
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
    return metrics | _verl_means(micro) | _row_metrics(rows, teaching)


def zero_variance_share(table: StepTable) -> float:
    """Return the share of groups with equal rewards among those with several trained trajectories."""
    equal = [
        float(np.ptp(table.rewards[chosen]) == 0.0 and chosen.sum() > 1)
        for group in range(table.num_groups)
        if (chosen := (table.group == group) & table.trained).any()
    ]
    return float(np.mean(equal)) if equal else 0.0


def _verl_means(micro: Sequence[MicroBatchFacts]) -> dict[str, float]:
    names = sorted({name for fact in micro for name in fact.metrics})
    result: dict[str, float] = {}
    for name in names:
        having = [(fact.num_trained_tokens, fact.metrics[name]) for fact in micro if name in fact.metrics]
        total = sum(weight for weight, _ in having)
        result[f"learner/{name}"] = sum(weight * value for weight, value in having) / max(1, total)
    return result


def _row_metrics(rows: Mapping[int, RowFacts], teaching: DistillationSection) -> dict[str, float]:
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
        # The mean of log p - log q over sampled tokens estimates the reverse KL, even if the loss uses the forward KL.
        is_other = teaching.kl == "forward" and not teaching.needs_logits
        name = "distillation/reverse_kl" if is_other else "distillation/kl"
        metrics |= {name: float(kl.mean()), f"{name}_max": float(kl.max())}
    return metrics | _mismatch(ordered)


def _reference_kl(rows: Sequence[RowFacts]) -> float:
    """Return the k3 estimate of KL(policy || reference), whatever the loss uses."""
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


def stopwatch(device: torch.device) -> Stopwatch:
    """Return a stopwatch that waits for the GPU's queue at the end of each part."""
    return Stopwatch(synchronize=partial(_synchronize, device), region=torch.profiler.record_function)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timing_metrics(watch: Stopwatch) -> dict[str, float]:
    """Return `timing_s/learner/*`; all but `total` add up to `total`."""
    seconds, total_s = watch.seconds(STRETCHES)
    return {f"timing_s/learner/{name}": value for name, value in {**seconds, "total": total_s}.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class MfuMeter:
    shape: ModelShape
    gpu: Gpu
    num_gpus: int

    def tflops(
        self, num_tokens: int, num_predicted: int, num_attended: int, num_picture_tokens: int, seconds: float
    ) -> float:
        """Return the useful TFLOP/s of each GPU. A backward counts as two forwards, or one for adapters alone;
        recomputation does not count."""
        products = sum(product_flops(self.shape, num_tokens, num_predicted))
        passes = 2 if self.shape.num_adapter_parameters else 3
        useful = passes * (products + attention_flops(self.shape, num_attended))
        return (useful + self.shape.tower_flops * num_picture_tokens) / seconds / self.num_gpus / 1e12


def mfu_meter(config: Config, device: torch.device) -> MfuMeter | None:
    """Return the meter of this run; None on a CPU, and on a GPU that the table lacks."""
    if device.type != "cuda":
        return None
    try:
        gpu = gpu_here()
    except InputError as error:
        log.warning("the run has no perf/mfu: %s", error)
        return None
    assert gpu is not None, "the learner has a GPU"
    return MfuMeter(shape=model_shape(config), gpu=gpu, num_gpus=config.learner.num_learners)


def mfu_metrics(micro: Sequence[MicroBatchFacts], meter: MfuMeter, seconds: float) -> dict[str, float]:
    """Return `perf/*` of the micro-batches of all ranks. `perf/mfu` counts each computed token once,
    `perf/mfu_unshared` each trajectory by itself (docs/scale.md)."""
    if not micro or seconds <= 0:
        return {}
    names = ("num_computed_tokens", "num_heads", "num_attended", "num_input_tokens", "num_input_attended")
    computed, heads, attended, inputs, input_attended = (sum(getattr(fact, name) for fact in micro) for name in names)
    shown = sum(fact.num_picture_tokens for fact in micro)
    tflops = meter.tflops(computed, heads, attended, shown, seconds)
    unshared = meter.tflops(inputs, inputs, input_attended, shown, seconds)
    return {
        "perf/tflops_per_gpu": tflops,
        "perf/mfu": tflops / meter.gpu.tflops,
        "perf/mfu_unshared": unshared / meter.gpu.tflops,
    }


class StepProfiler:
    """Profiles one step with torch's profiler: the first MOST_MICRO_BATCHES micro-batches of each pass."""

    def __init__(self, device: torch.device) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._activities = [ProfilerActivity.CPU, *on_gpu]
        self._profiler = profile(activities=self._activities)
        self._num_passed, self._num_recorded = 0, 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._profiler:
            yield

    def first_of(self, batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        first, others = batches[:MOST_MICRO_BATCHES], batches[MOST_MICRO_BATCHES:]
        self._num_passed += len(batches)
        self._num_recorded += len(first)
        yield from first
        if not others:
            return
        self._profiler.toggle_collection_dynamic(False, self._activities)
        yield from others
        self._profiler.toggle_collection_dynamic(True, self._activities)

    def profile(self, process: str) -> Profile | None:
        """Return the trace; None, with a warning, if it can't be written to a temporary file or is too large."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json.gz"
            try:
                self._profiler.export_chrome_trace(str(file))
                trace = read_trace(file)
            except (OSError, RuntimeError, ValueError) as error:
                log.warning("there is no profile of %s: %s", process, error)
                return None
        covers = f"{self._num_recorded} of {self._num_passed} micro-batches"
        return Profile(process=process, trace=trace, covers=covers)
