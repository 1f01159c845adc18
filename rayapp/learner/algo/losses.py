"""Computes policy losses with verl's functions, normalised so that the result doesn't depend on how the batch is split.

verl's `agg_loss` divides by global counts and multiplies by dp_size, because FSDP averages gradients.
`coupled_gradients` is for losses of the whole mini-batch (clip_cov, kl_cov, normalized weights): every rank computes
the same loss of all rows and keeps d loss / d log-prob, with which the backward of its own micro-batches starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rayapp.config.algorithm import POLICY_LOSSES, AlgorithmSection
from rayapp.core.errors import ConfigError
from rayapp.core.names import is_plugin, load_plugin
from rayapp.core.types import FloatArray
from rayapp.learner.algo.advantages import response_mask
from rayapp.learner.batch import TrainItem, stack_rows

if TYPE_CHECKING:
    from torch import Tensor


_LEAST_MEAN = 1e-8  # mean weight below which verl doesn't normalise


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Divisors of the losses of one optimizer step, over all ranks and micro-batches."""

    num_tokens: int  # in the loss
    num_trajectories: int
    dp_size: int  # ranks, whose gradients FSDP averages
    max_response_tokens: int  # of seq-mean-token-sum-norm (Dr. GRPO): a constant, not a micro-batch's width
    mean_weight: float = 1.0  # with rollout_correction.batch_normalize

    def for_verl(self) -> dict[str, int]:
        return {
            "dp_size": self.dp_size,
            "batch_num_tokens": max(1, self.num_tokens),
            "global_batch_size": max(1, self.num_trajectories),
            "loss_scale_factor": self.max_response_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRows:
    """Inputs of the policy loss for B trajectories of T response tokens, left-aligned."""

    log_probs: Tensor  # (B, T), with gradient
    old_log_probs: Tensor  # at the start of the step, (B, T)
    rollout_log_probs: Tensor  # the engine's, (B, T)
    advantages: Tensor  # (B, T)
    mask: Tensor  # (B, T) float32
    entropy: Tensor | None = None  # (B, T), with gradient if there is an entropy bonus
    ref_log_probs: Tensor | None = None  # (B, T)
    teacher_kl: Tensor | None = None  # (B, T), with gradient if it covers more than the sampled token

    def detached(self) -> LossRows:
        entropy, kl = (None if each is None else each.detach() for each in (self.entropy, self.teacher_kl))
        return replace(self, log_probs=self.log_probs.detach(), entropy=entropy, teacher_kl=kl)


def policy_loss(rows: LossRows, algorithm: AlgorithmSection, actor_config: Any, scale: LossScale) -> LossResult:
    """Return the configured policy loss, without KL and entropy. `actor_config` is of the same scale."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    name = algorithm.policy_loss
    # In bypass mode the engine's distribution is the old policy: the loss's ratio corrects the difference to the
    # learner.
    old = rows.rollout_log_probs if name == "bypass_mode" else rows.old_log_probs
    weights = correction_weights(rows.old_log_probs, rows.rollout_log_probs, rows.mask, algorithm)
    weights = None if weights is None else weights / scale.mean_weight
    function = get_policy_loss_fn(name) if name in POLICY_LOSSES else load_plugin("losses", name)
    loss, metrics = function(
        old_log_prob=old,
        log_prob=rows.log_probs,
        advantages=rows.advantages,
        response_mask=rows.mask,
        loss_agg_mode=algorithm.loss_agg_mode,
        config=actor_config,
        rollout_is_weights=weights,
    )
    if name == "geo_mean":
        # geo_mean divides by the rows of this micro-batch; every other loss divides by the global counts.
        loss = loss * (rows.mask.shape[0] * scale.dp_size / max(1, scale.num_trajectories))
    return LossResult(loss=loss, metrics={key.removeprefix("actor/"): float(value) for key, value in metrics.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """Scalar loss, and verl's metrics averaged over tokens."""

    loss: Tensor
    metrics: dict[str, float]


def correction_weights(old: Tensor, rollout: Tensor, mask: Tensor, algorithm: AlgorithmSection) -> Tensor | None:
    """Return bounded importance weights between learner and engine, (B, T), from their log-probs. None in bypass mode
    too: its loss takes the engine's log-probs as the old ones."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    correction = algorithm.rollout_correction
    if correction.level == "none" or algorithm.policy_loss == "bypass_mode":
        return None
    weights, _ = compute_rollout_correction_weights(
        (old - rollout).detach(), mask, rollout_is=correction.level, rollout_is_threshold=correction.bounds
    )
    result: Tensor = weights
    return result


def mean_weight(weights: Tensor, mask: Tensor, algorithm: AlgorithmSection) -> float:
    """Return the mean weight over tokens, or over sequences if each has one weight; 1 if all are 0."""
    counts = mask if algorithm.rollout_correction.level == "token" else mask / mask.sum(-1, keepdim=True).clamp(min=1)
    mean = float((weights * counts).sum() / counts.sum().clamp(min=1e-8))
    return mean if mean > _LEAST_MEAN else 1.0


def kl_loss(rows: LossRows, algorithm: AlgorithmSection, scale: LossScale) -> Tensor:
    from verl.trainer.ppo.core_algos import kl_penalty

    assert rows.ref_log_probs is not None, "the KL loss needs reference log-probs"
    per_token = kl_penalty(rows.log_probs, rows.ref_log_probs, algorithm.kl_loss_type)
    return aggregated(per_token, rows.mask, algorithm, scale)


def aggregated(values: Tensor, mask: Tensor, algorithm: AlgorithmSection, scale: LossScale) -> Tensor:
    from verl.trainer.ppo.core_algos import agg_loss

    loss: Tensor = agg_loss(values, mask, algorithm.loss_agg_mode, **scale.for_verl())
    return loss


def make_actor_config(algorithm: AlgorithmSection, scale: LossScale, group_size: int) -> Any:
    """Return the ActorConfig that verl's losses read. ConfigError: `algorithm.policy_loss` is unknown."""
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    check_policy_loss(algorithm.policy_loss)
    options = algorithm.policy_loss_options
    correction = RolloutCorrectionConfig(
        rollout_is=None if algorithm.rollout_correction.level == "none" else algorithm.rollout_correction.level,
        rollout_is_threshold=algorithm.rollout_correction.bounds,
        rollout_is_batch_normalize=algorithm.is_batch_coupled and algorithm.rollout_correction.batch_normalize,
        **_declared(options, RolloutCorrectionConfig),
    )
    loss = PolicyLossConfig(
        loss_mode=algorithm.policy_loss, rollout_correction=correction, **_declared(options, PolicyLossConfig)
    )
    return ActorConfig(
        strategy="fsdp2",
        rollout_n=group_size,
        use_dynamic_bsz=True,
        clip_ratio=algorithm.clip_ratio_low,
        clip_ratio_low=algorithm.clip_ratio_low,
        clip_ratio_high=algorithm.clip_ratio_high,
        clip_ratio_c=algorithm.clip_ratio_c,
        loss_agg_mode=algorithm.loss_agg_mode,
        policy_loss=loss,
        global_batch_info=scale.for_verl(),
        **_declared(options, ActorConfig),
    )


def check_policy_loss(name: str) -> None:
    if name not in POLICY_LOSSES and not is_plugin("losses", name):
        raise ConfigError(
            f"algorithm.policy_loss {name!r} is neither a policy loss of verl 0.9.1 nor a plug-in. Use one of "
            f"{', '.join(POLICY_LOSSES)}."
        )


def _declared(options: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Return the options of `config_class`; none is a field of two of verl's classes."""
    names = {field.name for field in fields(config_class)}
    return {name: value for name, value in options.items() if name in names}


Scored = tuple[TrainItem, FloatArray, FloatArray]  # trajectory, its log-probs now, and at the start of the step


class Coupled(NamedTuple):
    """Loss of a whole mini-batch, and its gradients, both times dp_size."""

    loss: float
    slopes: dict[int, FloatArray]  # gradient for each row's log-probs, (R,), by row

    def surrogate(self, log_probs: Tensor, rows: Sequence[int]) -> Tensor:
        """Return a loss with the gradients of these rows. Its values over all micro-batches add up to `loss`."""
        slopes = stack_rows([self.slopes[row] for row in rows], log_probs.shape[1]).to(log_probs.device)
        return ((log_probs - log_probs.detach()) * slopes).sum() + self.loss * len(rows) / len(self.slopes)


def coupled_gradients(
    scored: Sequence[Scored], algorithm: AlgorithmSection, actor_config: Any, scale: LossScale, *, seed: int
) -> Coupled:
    if not scored:
        return Coupled(0.0, {})
    scored = sorted(scored, key=lambda entry: entry[0].row)
    items = [item for item, _, _ in scored]
    mask = response_mask(np.array([item.advantages.size for item in items]))
    width = mask.shape[1]
    log_probs = stack_rows([now for _, now, _ in scored], width).requires_grad_()
    rows = LossRows(
        log_probs=log_probs,
        old_log_probs=stack_rows([old for _, _, old in scored], width),
        rollout_log_probs=stack_rows([item.rollout_log_probs for item in items], width),
        advantages=stack_rows([item.advantages for item in items], width),
        mask=mask,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loss = policy_loss(rows, algorithm, actor_config, scale).loss
    (slopes,) = torch.autograd.grad(loss, log_probs)
    by_row = {item.row: slopes[i, : item.advantages.size].numpy() for i, item in enumerate(items)}
    return Coupled(float(loss.detach()), by_row)
