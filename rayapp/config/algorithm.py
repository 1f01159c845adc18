"""The section `algorithm`: from rewards to a loss. See `config.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayapp.config.base import FrozenModel

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


class RolloutCorrectionSection(FrozenModel):
    """Importance sampling between the engine that sampled and the learner that trains (verl's rollout correction)."""

    level: Literal["none", "token", "sequence"] = "none"
    """none measures the difference but does not correct it."""
    threshold: float = Field(2.0, gt=1.0)
    """Weights above it are truncated to it (TIS)."""


class DynamicSamplingSection(FrozenModel):
    """DAPO's dynamic sampling."""

    enabled: bool = False
    """Replace groups whose rewards are all equal by further prompts: every group of a step then teaches something."""
    max_dropped_per_step: int = Field(8, ge=1)
    """Most groups to replace; further ones are kept, so that a step ends even when every prompt, or none, is solved."""


class CurriculumSection(FrozenModel):
    """Prompts by difficulty."""

    enabled: bool = False
    """Draw each group's prompt by weight instead of going through all in turn: 4 p (1 - p) of the share p of its
    trajectories that were solved so far, so that what is always or never solved comes less often. With several
    `sources` it is a source that is drawn: by its ratio times that of all its trajectories."""
    min_weight: float = Field(0.1, gt=0.0, le=1.0)
    """Weight of a prompt that is always or never solved; one that was never tried has 1."""


class OverlongSection(FrozenModel):
    """DAPO's treatment of completions that run into rollout.max_completion_tokens."""

    filter: bool = False
    """Leave truncated trajectories out of the loss. They stay in their group's baseline."""
    buffer_tokens: int = Field(0, ge=0)
    """Soft punishment: the last so many tokens before the limit cost reward, linearly. 0 punishes nothing."""
    penalty: float = Field(1.0, gt=0.0)
    """Reward lost at the limit."""


class AlgorithmSection(FrozenModel):
    adv_estimator: str = "grpo"
    """A name of verl's ADV_ESTIMATOR_REGISTRY that needs no critic."""
    norm_adv_by_std: bool = True
    """Divide by the group's standard deviation. False is Dr. GRPO."""
    gdpo_reward_terms: tuple[str, ...] = ()
    """For gdpo: the reward terms that are normalised one by one. Empty normalises the total."""
    policy_loss: str = "vanilla"
    """A name of verl's POLICY_LOSS_REGISTRY."""
    policy_loss_options: dict[str, float | int | str | bool] = {}  # noqa: RUF012 - pydantic copies it
    """Further keys of verl's PolicyLossConfig, for the losses that have their own (clip_cov, kl_cov, …)."""
    loss_agg_mode: LossAggMode = "token-mean"
    clip_ratio_low: float = Field(0.2, ge=0.0)
    clip_ratio_high: float = Field(0.2, ge=0.0)
    """Above clip_ratio_low it is DAPO's clip-higher."""
    clip_ratio_c: float = Field(3.0, gt=1.0)
    """Dual clip: bound of the loss for negative advantages."""
    kl_loss_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL to the frozen reference. At 0 no reference model is loaded."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the entropy bonus. Entropy is measured every step whatever this is."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    curriculum: CurriculumSection = CurriculumSection()
    overlong: OverlongSection = OverlongSection()
