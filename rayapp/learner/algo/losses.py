"""Policy losses: verl's functions on verl's own `ActorConfig`, normalised so that no split of the batch matters.

Called by the learner for every micro-batch. verl's `agg_loss` divides by the global counts it is given in
`global_batch_info`, and multiplies by dp_size because FSDP averages gradients over ranks. What one loss leaves out of
that (geo_mean takes the mean over its own rows) is mended here, so that micro-batches and ranks always add up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rayapp.config.algorithm import AlgorithmSection
from rayapp.config.algorithm_names import POLICY_LOSSES
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.core.names.plugins import is_plugin, load_plugin

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The divisors of every loss of one optimizer step: counts over all ranks and all micro-batches."""

    num_tokens: int
    """Response tokens of trainable trajectories."""
    num_trajectories: int
    """Trainable trajectories."""
    dp_size: int
    """Number of ranks, whose gradients FSDP averages."""
    max_response_tokens: int
    """Divisor of seq-mean-token-sum-norm (Dr. GRPO): a constant, never the longest row of a micro-batch."""

    def for_verl(self) -> dict[str, int]:
        """Keyword arguments of verl's `agg_loss`."""
        return {
            "dp_size": self.dp_size,
            "batch_num_tokens": max(1, self.num_tokens),
            "global_batch_size": max(1, self.num_trajectories),
            "loss_scale_factor": self.max_response_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRows:
    """B compact rows (see `advantages`), T tokens."""

    log_probs: Tensor
    """(B, T) log-probs under the policy as it is, with gradient."""
    old_log_probs: Tensor
    """(B, T) log-probs under the policy at the start of the step."""
    rollout_log_probs: Tensor
    """(B, T) log-probs that the engine reported."""
    advantages: Tensor
    """(B, T)"""
    mask: Tensor
    """(B, T) float32"""
    entropy: Tensor | None = None
    """(B, T), with gradient when the entropy bonus needs it."""
    ref_log_probs: Tensor | None = None
    """(B, T) log-probs under the frozen reference, when the KL loss needs it."""
    teacher_kl: Tensor | None = None
    """(B, T) KL to the teacher, with gradient where it is taken over more than the sampled token."""


def policy_loss(rows: LossRows, algorithm: AlgorithmSection, actor_config: Any, scale: LossScale) -> LossResult:
    """The configured policy loss of these rows, without KL and entropy.

    Args:
        actor_config: made by `make_actor_config` with the same scale.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    name = algorithm.policy_loss
    # In bypass mode the engine's distribution is the old policy: the ratio itself corrects the difference.
    old = rows.rollout_log_probs if name == "bypass_mode" else rows.old_log_probs
    weights = None if name == "bypass_mode" else correction_weights(rows, algorithm)
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
        # geo_mean takes the mean over its own rows; every other loss divides by the global counts.
        loss = loss * (rows.mask.shape[0] * scale.dp_size / max(1, scale.num_trajectories))
    return LossResult(loss=loss, metrics={key.removeprefix("actor/"): float(value) for key, value in metrics.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """A scalar loss and what verl measured on the way, averaged over the rows' tokens."""

    loss: Tensor
    metrics: dict[str, float]


def correction_weights(rows: LossRows, algorithm: AlgorithmSection) -> Tensor | None:
    """Truncated importance weights between learner and engine (B, T); None when they are not asked for."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    correction = algorithm.rollout_correction
    if correction.level == "none":
        return None
    log_ratio = rows.old_log_probs - rows.rollout_log_probs
    weights, _ = compute_rollout_correction_weights(
        log_ratio.detach(), rows.mask, rollout_is=correction.level, rollout_is_threshold=correction.threshold
    )
    result: Tensor = weights
    return result


def kl_loss(rows: LossRows, algorithm: AlgorithmSection, scale: LossScale) -> Tensor:
    """KL to the frozen reference, aggregated as the policy loss is; not yet times its coefficient."""
    from verl.trainer.ppo.core_algos import kl_penalty

    assert rows.ref_log_probs is not None, "the KL loss needs reference log-probs"
    per_token = kl_penalty(rows.log_probs, rows.ref_log_probs, algorithm.kl_loss_type)
    return aggregated(per_token, rows.mask, algorithm, scale)


def aggregated(values: Tensor, mask: Tensor, algorithm: AlgorithmSection, scale: LossScale) -> Tensor:
    """One number of a value for every token, (B, T), as the policy loss makes it."""
    from verl.trainer.ppo.core_algos import agg_loss

    loss: Tensor = agg_loss(values, mask, algorithm.loss_agg_mode, **scale.for_verl())
    return loss


def make_actor_config(config: Config, scale: LossScale) -> Any:
    """verl's ActorConfig, which its losses read.

    Raises:
        ConfigError: `algorithm.policy_loss` or a key of `algorithm.policy_loss_options` is unknown.
    """
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.workers.config.actor import ActorConfig, PolicyLossConfig

    algorithm = config.algorithm
    check_policy_loss(algorithm.policy_loss)
    options = _Options(algorithm)
    correction = RolloutCorrectionConfig(
        rollout_is=None if algorithm.rollout_correction.level == "none" else algorithm.rollout_correction.level,
        rollout_is_threshold=algorithm.rollout_correction.threshold,
        **options.take(RolloutCorrectionConfig),
    )
    loss = PolicyLossConfig(
        loss_mode=algorithm.policy_loss, rollout_correction=correction, **options.take(PolicyLossConfig)
    )
    actor = ActorConfig(
        strategy="fsdp2",
        rollout_n=config.rollout.group_size,
        use_dynamic_bsz=True,
        clip_ratio=algorithm.clip_ratio_low,
        clip_ratio_low=algorithm.clip_ratio_low,
        clip_ratio_high=algorithm.clip_ratio_high,
        clip_ratio_c=algorithm.clip_ratio_c,
        loss_agg_mode=algorithm.loss_agg_mode,
        policy_loss=loss,
        global_batch_info=scale.for_verl(),
        **options.take_names("tau_pos", "tau_neg"),
    )
    options.all_taken()
    return actor


def check_policy_loss(name: str) -> None:
    """Raises ConfigError unless `name` is a policy loss of verl 0.9.1."""
    if name not in POLICY_LOSSES and not is_plugin("losses", name):
        raise ConfigError(
            f"algorithm.policy_loss {name!r} is none of verl 0.9.1's: use one of {', '.join(POLICY_LOSSES)}."
        )


class _Options:
    """`algorithm.policy_loss_options`, each key handed to the one verl config that declares it."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._left = dict(algorithm.policy_loss_options)
        self._known: set[str] = set()

    def take(self, config_class: Any) -> dict[str, Any]:
        # Options that our own config keys set: a second way to say them could contradict the first.
        ours = {"loss_mode", "rollout_correction", "rollout_is", "rollout_is_threshold"}
        return self.take_names(*({field.name for field in fields(config_class)} - ours))

    def take_names(self, *names: str) -> dict[str, Any]:
        self._known.update(name for name in names if not name.startswith("_"))
        return {name: self._left.pop(name) for name in sorted(names) if name in self._left}

    def all_taken(self) -> None:
        if self._left:
            raise ConfigError(
                f"algorithm.policy_loss_options has unknown keys {sorted(self._left)}: verl 0.9.1 knows "
                f"{', '.join(sorted(self._known))}."
            )
