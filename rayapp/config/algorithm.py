"""Section `algorithm`, from rewards to a loss: its keys, the names of estimators and losses, the options of losses.

The names are copied because `import verl` takes seconds; a test compares them with verl 0.9.1's registries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from rayapp.config.base import FrozenModel

ADV_ESTIMATORS = (
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)
NEEDS_CRITIC = ("gae",)  # in verl's registry, but rayapp has no value model

# Their baseline weights tokens by the policy's probabilities, which need one more forward pass.
NEEDS_LOG_PROBS = ("optimal_token_baseline", "tir_optimal_token_baseline")
NEEDS_NO_GROUP = ("reinforce_plus_plus", "remax")  # Their baseline is not the mean of the group.
# If a prompt has one trajectory, these estimators have the advantage 0, and others the reward.
NEEDS_GROUP = ("grpo_passk", "rloo_vectorized")
# The baseline is the reward of each group's last trajectory, sampled greedily and not trained on.
NEEDS_GREEDY_BASELINE = ("remax",)


class PolicyLoss(NamedTuple):
    pulls_at_zero_advantage: bool  # a trajectory without an advantage may have a gradient
    options: tuple[str, ...] = ()
    is_batch_coupled: bool = False  # selects tokens by statistics of the whole mini-batch
    clip: str = ""  # meaning of clip_ratio_low and clip_ratio_high, if PPO's numbers mean something else


_CISPO = "CISPO bounds importance weights: MiniMax-M1 sets clip_ratio_low=1 (no lower bound) and tunes a wide upper one"
_DPPO = "DPPO bounds {} of each token, and weights by clip_ratio_c (20 in verl's loss, 3 is PPO's)"

# Policy losses of verl 0.9.1.
POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "bypass_mode": PolicyLoss(False, ("loss_type", "rollout_rs", "rollout_rs_threshold")),
    "cispo": PolicyLoss(False, clip=_CISPO),
    "clip_cov": PolicyLoss(True, ("clip_cov_lb", "clip_cov_ratio", "clip_cov_ub"), is_batch_coupled=True),
    "dppo_kl": PolicyLoss(False, clip=_DPPO.format("the KL divergence")),
    "dppo_tv": PolicyLoss(False, clip=_DPPO.format("the change of probability")),
    "dro": PolicyLoss(True, ("dro_beta",)),
    "geo_mean": PolicyLoss(False, clip="GMPO bounds log ratios of tokens: verl's example has 0.4 for both"),
    "gpg": PolicyLoss(False),
    "gspo": PolicyLoss(False, clip="GSPO bounds ratios of whole answers: verl's example has 3e-4 and 4e-4"),
    "kl_cov": PolicyLoss(True, ("kl_cov_ratio", "ppo_kl_coef"), is_batch_coupled=True),
    "sapo": PolicyLoss(False, ("tau_neg", "tau_pos")),
    "vanilla": PolicyLoss(False),
}
# Criteria for the option `rollout_rs` of bypass_mode, which may name several, separated by commas.
REJECTION_CRITERIA = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
# Ratio that the range of a k1 criterion bounds (verl's k1), inverse to the weights of `rollout_correction`.
K1_RATIO = "the engine's probability over the learner's"
_TEXTS = {"loss_type", "rollout_rs", "rollout_rs_threshold"}

Options = Mapping[str, float | int | str | bool]


def options_of(loss: str) -> tuple[str, ...]:
    """Return the options that a loss reads; a plug-in's loss may read any of verl's."""
    if loss in POLICY_LOSSES:
        return POLICY_LOSSES[loss].options
    return tuple(sorted(name for known in POLICY_LOSSES.values() for name in known.options))


def check_loss_options(loss: str, options: Options) -> None:
    """Raise ValueError if an option is not read, is missing, or has an invalid value."""
    known = options_of(loss)
    if unread := sorted(set(options) - set(known)):
        homes = [
            f"{name} belongs to {home}"
            for home, known_loss in POLICY_LOSSES.items()
            for name in known_loss.options
            if name in unread
        ]
        raise ValueError(
            f"algorithm.policy_loss_options has {', '.join(unread)}, which policy_loss {loss} does not read. {loss} "
            "reads "
            f"{', '.join(known) or 'no options'}." + (f" ({'; '.join(homes)}.)" if homes else "")
        )
    for name in sorted(set(options) - _TEXTS):
        if isinstance(options[name], bool | str):
            raise ValueError(  # noqa: TRY004 - pydantic explains ValueErrors
                f"algorithm.policy_loss_options.{name} is {options[name]!r}: it must be a number."
            )
    if loss == "dro" and not float(options.get("dro_beta", 0.0)) > 0.0:
        raise ValueError("algorithm.policy_loss is dro, which needs algorithm.policy_loss_options.dro_beta above 0.")
    if options.get("loss_type", "ppo_clip") not in ("ppo_clip", "reinforce"):
        raise ValueError(
            f"algorithm.policy_loss_options.loss_type is {options['loss_type']!r}: use ppo_clip or reinforce."
        )
    _check_rejection(options)


def _check_rejection(options: Options) -> None:
    given, missing = "rollout_rs", "rollout_rs_threshold"
    if given not in options:
        given, missing = missing, given
    if given in options and missing not in options:
        raise ValueError(
            f"algorithm.policy_loss_options has {given} without {missing}. Add {missing}, or remove {given}."
        )
    if "rollout_rs" not in options:
        return
    criteria = dict.fromkeys(part.strip() for part in str(options["rollout_rs"]).split(",") if part.strip())
    if not criteria or set(criteria) - set(REJECTION_CRITERIA):
        raise ValueError(
            f"algorithm.policy_loss_options.rollout_rs is {options['rollout_rs']!r}: use one of "
            f"{', '.join(REJECTION_CRITERIA)}, or several of them separated by commas."
        )
    limits = [part.strip() for part in str(options["rollout_rs_threshold"]).split(",") if part.strip()]
    whole = limits * len(criteria) if len(limits) == 1 else limits
    shown = f"algorithm.policy_loss_options.rollout_rs_threshold is {options['rollout_rs_threshold']!r}"
    if len(whole) != len(criteria):
        raise ValueError(
            f"{shown}, which is {len(limits)} limits for {len(criteria)} criteria in rollout_rs: give one limit for "
            "all criteria, or one for each."
        )
    for criterion, limit in zip(criteria, whole, strict=True):
        if not _is_limit(criterion, limit):
            ranges = f", or a range of {K1_RATIO} such as 0.5_2" if criterion.endswith("k1") else ""
            raise ValueError(f"{shown}, but the limit of {criterion} must be a number above 0{ranges}.")


def _is_limit(criterion: str, text: str) -> bool:
    try:
        limits = [float(part) for part in text.split("_")]
    except ValueError:
        return False
    most = 2 if criterion.endswith("k1") else 1
    return len(limits) <= most and all(limit > 0.0 for limit in limits) and limits == sorted(limits)


LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


class RolloutCorrectionSection(FrozenModel):
    """Importance sampling between the engine that sampled and the learner that trains (verl's rollout correction)."""

    level: Literal["none", "token", "sequence"] = "none"
    """Granularity of the importance weights. none: measure the difference but don't correct it. If servers round what
    learners don't (server.quantization, server.kv_cache_dtype), the default is token."""
    threshold: float = Field(2.0, gt=1.0)
    """Bound of importance weights: larger weights are truncated to this value (TIS)."""
    min_weight: float | None = Field(None, gt=0.0, lt=1.0)
    """Lower bound of importance weights: weights below this value and weights above `threshold` are set to 0 instead of
    being truncated (IcePop). null: truncate."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the step (with bypass_mode: over the mini-batch), so that the correction
    doesn't change the size of the update."""

    @property
    def bounds(self) -> float | str:
        """In verl's notation: a number truncates weights; `lower_upper` sets weights outside this range to 0."""
        return self.threshold if self.min_weight is None else f"{self.min_weight}_{self.threshold}"


class KlInRewardSection(FrozenModel):
    """A KL to the frozen reference that is subtracted from the reward of every token, as in RLHF."""

    coef: float = Field(0.0, ge=0.0, allow_inf_nan=False)
    """Coefficient of the KL: reward that a token loses per nat. 0: no KL in the reward."""
    type: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    """Estimator of a token's KL, by verl's names: k1, k2 and k3 as in Schulman's note; abs is the absolute value of
    k1."""


class DynamicSamplingSection(FrozenModel):
    """DAPO's dynamic sampling: groups without a gradient are replaced."""

    enabled: bool = False
    """Replace groups whose rewards are all equal with groups of further prompts, so that every group of a step has a
    gradient."""
    max_dropped_per_step: int = Field(8, ge=1)
    """Maximum number of groups to replace per step. Further groups are kept, so that a step ends even if all or no
    prompts are solved."""
    metric: str = ""
    """Reward term to compare within a group, e.g. score or acc (verl's filter_groups.metric). Empty: the reward, length
    penalty included. If a reward function returns only a number, acc is that number."""


class OverlongSection(FrozenModel):
    """DAPO's treatment of completions that reach rollout.max_completion_tokens."""

    filter: bool = False
    """Exclude trajectories that were cut off at their limit from the loss. They still count in their group's
    baseline."""
    buffer_tokens: int = Field(0, ge=0)
    """Number of tokens before the limit within which the reward falls linearly, by `penalty` in total. 0: no
    penalty."""
    penalty: float = Field(1.0, gt=0.0)
    """Amount that is subtracted from the reward of a completion at the limit."""


class AlgorithmSection(FrozenModel):
    """Advantages and loss (docs/learner.md)."""

    adv_estimator: str = "grpo"
    """Advantage estimator: a name in verl's ADV_ESTIMATOR_REGISTRY that needs no critic, or a plug-in's."""
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation. false: as in Dr. GRPO."""
    gdpo_reward_terms: tuple[str, ...] = ()
    """Reward terms to normalise separately, for adv_estimator gdpo. Empty: normalise the total reward."""
    policy_loss: str = "vanilla"
    """Policy loss: a name in verl's POLICY_LOSS_REGISTRY, or a plug-in's."""
    policy_loss_options: dict[str, float | int | str | bool] = {}  # noqa: RUF012 - pydantic copies it
    """Options of policy_loss; others are errors. clip_cov: clip_cov_ratio, clip_cov_lb, clip_cov_ub; kl_cov:
    kl_cov_ratio, ppo_kl_coef; dro: dro_beta (required); sapo: tau_pos, tau_neg; bypass_mode: loss_type, rollout_rs,
    rollout_rs_threshold. With rollout_rs's k1 criteria, 0.5_2 bounds the engine's probability over the learner's."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Average over tokens in the loss, by verl's names. token-mean: every token of the step has the same weight.
    seq-mean-…: every trajectory has the same weight; -token-sum-norm divides by the longest response (Dr. GRPO)."""
    clip_ratio_low: float = Field(0.2, ge=0.0)
    """PPO's clip: lower bound of the probability ratio is 1 - clip_ratio_low."""
    clip_ratio_high: float = Field(0.2, ge=0.0)
    """PPO's clip: upper bound of the probability ratio is 1 + clip_ratio_high. A value above clip_ratio_low is DAPO's
    clip-higher."""
    clip_ratio_c: float = Field(3.0, gt=1.0)
    """Dual-clip PPO: for a negative advantage A, a token's loss is at most clip_ratio_c x |A|."""
    kl_loss_coef: float = Field(0.0, ge=0.0)
    """Weight of the KL loss to the frozen reference model. 0: no reference is loaded."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs", "k1+", "k3+", "low_var_kl+", "abs+"] = "k3"
    """Estimator of the KL: k1, k2 and k3 as in Schulman's note; low_var_kl is verl's name for k3; abs is the absolute
    log-ratio. With a `+`, the gradient is that of k2, which is unbiased."""
    kl_in_reward: KlInRewardSection = KlInRewardSection()
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the policy's entropy, which the loss rewards. Entropy is measured every step, also with weight 0."""
    rollout_correction: RolloutCorrectionSection = RolloutCorrectionSection()
    dynamic_sampling: DynamicSamplingSection = DynamicSamplingSection()
    overlong: OverlongSection = OverlongSection()

    @property
    def has_reference(self) -> bool:
        return self.kl_loss_coef > 0 or self.kl_in_reward.coef > 0

    @property
    def scores_before_advantages(self) -> bool:
        """True if advantages or importance weights need all trajectories' log-probs before the update."""
        return self.adv_estimator in NEEDS_LOG_PROBS or self.kl_in_reward.coef > 0 or self.normalizes_by_step

    @property
    def normalizes_by_step(self) -> bool:
        """True if importance weights are divided by their mean over the step."""
        return self._normalizes and self.policy_loss != "bypass_mode"

    @property
    def is_batch_coupled(self) -> bool:
        """True if a token's loss depends on the whole mini-batch."""
        weighs_itself = self.policy_loss == "bypass_mode" and self.policy_loss_options.get("loss_type") == "reinforce"
        known = POLICY_LOSSES.get(self.policy_loss)
        return (known is not None and known.is_batch_coupled) or (weighs_itself and self._normalizes)

    @property
    def pulls_at_zero_advantage(self) -> bool:
        """True if a trajectory without an advantage may have a gradient; a plug-in's loss may have any terms."""
        known = POLICY_LOSSES.get(self.policy_loss)
        has_terms = self.kl_loss_coef > 0 or self.entropy_coef > 0 or self.is_batch_coupled
        return has_terms or known is None or known.pulls_at_zero_advantage

    @property
    def loss_note(self) -> str:
        """Sentence for users whose loss has another loss's numbers; else empty."""
        known = POLICY_LOSSES.get(self.policy_loss)
        if known is None or not known.clip or self.clip_ratio_low != 0.2:
            return ""
        numbers = f"clip_ratio_low is 0.2 and clip_ratio_high {self.clip_ratio_high:g}, as for PPO"
        return f"algorithm.policy_loss is {self.policy_loss}, but {numbers}. {known.clip}."

    @property
    def _normalizes(self) -> bool:
        return self.rollout_correction.batch_normalize and self.rollout_correction.level != "none"

    @model_validator(mode="after")
    def _loss_reads_its_options(self) -> Self:
        check_loss_options(self.policy_loss, self.policy_loss_options)
        return self
