"""Computes advantages with verl's estimators.

Every rank calls it once a step with all trained trajectories, because some estimators whiten over all of them. Row i
holds trajectory i's response tokens, left-aligned, with the reward on the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rayapp.config.algorithm import (
    ADV_ESTIMATORS,
    NEEDS_CRITIC,
    NEEDS_GREEDY_BASELINE,
    NEEDS_LOG_PROBS,
    AlgorithmSection,
    KlInRewardSection,
)
from rayapp.core.errors import ConfigError, LearnerError
from rayapp.core.names import is_plugin, load_plugin
from rayapp.core.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """Inputs of an estimator for B trajectories, of which the longest has T response tokens.

    Example: two groups of two, one trajectory of the second invalid and left out -> B = 3, group_index [0, 0, 1].
    """

    rewards: FloatArray  # (B,)
    num_response_tokens: NDArray[np.int64]  # (B,), at least 1
    group_index: NDArray[np.int64]  # (B,): equal for trajectories of one prompt
    reward_terms: dict[str, FloatArray]  # values (B,) by term, each of which gdpo normalises
    baselines: FloatArray | None = None  # of each group's greedy trajectory, (B,); only for remax
    kl_penalty: Tensor | None = None  # (B, T), what each token loses for its KL to the reference
    old_log_probs: Tensor | None = None  # (B, T); only for the optimal token baselines
    sum_pi_squared: Tensor | None = None  # (B, T); only for the optimal token baselines
    is_weights: Tensor | None = None  # of the rollout correction, (B, T)


def compute_advantages(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> Tensor:
    """Return the advantage of each response token, (B, T) float32, 0 past a row's own tokens."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    check_estimator(algorithm.adv_estimator)
    if not np.isfinite(inputs.rewards).all():
        raise LearnerError(f"rewards must be finite, got {inputs.rewards.tolist()}: the task's scorer has a bug")
    name = algorithm.adv_estimator
    estimate = get_adv_estimator_fn(name) if name in ADV_ESTIMATORS else load_plugin("estimators", name)
    advantages: Tensor = estimate(**_arguments(inputs, algorithm))[0]
    return advantages.detach().float()


def token_kl(log_probs: FloatArray, reference: FloatArray, section: KlInRewardSection) -> FloatArray:
    """Estimate the KL to the reference, (R,), for each sampled token."""
    import torch
    from verl.trainer.ppo.core_algos import kl_penalty

    kl: FloatArray = kl_penalty(torch.from_numpy(log_probs), torch.from_numpy(reference), section.type).numpy()
    return kl


class KlPenalty(NamedTuple):
    rewards: Tensor  # (B, T), lost by each token
    mean_kl: float  # over trajectories, of their mean KL per token


def kl_penalty_of(kl: Tensor, num_response_tokens: NDArray[np.int64], coef: float) -> KlPenalty:
    """Multiply the KL (B, T) by the coefficient."""
    import torch

    mean_kl = float((kl.sum(-1) / torch.from_numpy(num_response_tokens)).mean())
    return KlPenalty(rewards=coef * kl, mean_kl=mean_kl)


def check_estimator(name: str) -> None:
    """Raise ConfigError if the estimator is unknown or needs a critic."""
    if name in NEEDS_CRITIC:
        raise ConfigError(
            f"algorithm.adv_estimator {name!r} needs a critic, which rayapp doesn't have. Use one of {_names()}."
        )
    if name not in ADV_ESTIMATORS and not is_plugin("estimators", name):
        raise ConfigError(
            f"algorithm.adv_estimator {name!r} is neither an estimator of verl 0.9.1 nor a plug-in. Use one of "
            f"{_names()}."
        )


def response_mask(num_response_tokens: Sequence[int] | NDArray[np.int64]) -> Tensor:
    """Return a mask (B, T) float32: 1 on a row's own tokens. T is the longest row's length, at least 1."""
    import torch

    lengths = torch.as_tensor(np.asarray(num_response_tokens))
    width = max(1, int(lengths.max())) if lengths.numel() else 1
    return (torch.arange(width) < lengths[:, None]).float()


def _arguments(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> dict[str, Any]:
    import torch

    mask = response_mask(inputs.num_response_tokens)
    name = algorithm.adv_estimator
    rewards = _on_last_token(torch.as_tensor(inputs.rewards), mask, name)
    if inputs.kl_penalty is not None:
        rewards -= inputs.kl_penalty
    arguments: dict[str, Any] = {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": inputs.group_index,
        "config": _algo_config(algorithm),
    }
    if name.startswith("grpo") or name == "gdpo":
        arguments["norm_adv_by_std_in_grpo"] = algorithm.norm_adv_by_std
    if name == "gdpo":
        arguments |= _gdpo_arguments(inputs, mask, algorithm)
    if name in NEEDS_GREEDY_BASELINE:
        arguments["reward_baselines"] = torch.as_tensor(_required(inputs.baselines, name, "baselines"))
    if name in NEEDS_LOG_PROBS:
        arguments["old_log_probs"] = _required(inputs.old_log_probs, name, "old_log_probs")
        arguments["sum_pi_squared"] = _required(inputs.sum_pi_squared, name, "sum_pi_squared")
        arguments["rollout_is_weights"] = inputs.is_weights
    return arguments


def _gdpo_arguments(inputs: AdvantageInputs, mask: Tensor, algorithm: AlgorithmSection) -> dict[str, Any]:
    import torch

    if not algorithm.gdpo_reward_terms:
        return {"config": None}
    # Take only terms that every reward has: a missing term is NaN.
    whole = {name for name, values in inputs.reward_terms.items() if np.isfinite(values).all()}
    missing = sorted(set(algorithm.gdpo_reward_terms) - whole)
    if missing:
        raise ConfigError(
            f"algorithm.gdpo_reward_terms names {', '.join(missing)}, but some rewards lack these terms. Name only "
            f"terms that all rewards have: {', '.join(sorted(whole)) or 'there are none'}."
        )
    prompts = torch.zeros(mask.shape[0], 0)
    # verl puts terms into float32, where rounding would give a group of equal terms an advantage, which whitening then
    # scales up. Without their group's mean, which the estimator subtracts anyway, equal terms are exactly 0.
    terms = {name: _centred(inputs.reward_terms[name], inputs.group_index) for name in algorithm.gdpo_reward_terms}
    return {"non_tensor_batch": terms, "batch": {"prompts": prompts, "attention_mask": mask.long()}}


def _centred(values: FloatArray, group_index: NDArray[np.int64]) -> NDArray[np.float64]:
    # A value alone in its group stays, as the estimator leaves it.
    _, group = np.unique(group_index, return_inverse=True)
    sizes = np.bincount(group)
    means = np.where(sizes > 1, np.bincount(group, weights=values.astype(np.float64)) / sizes, 0.0)
    result: NDArray[np.float64] = values - means[group]
    return result


def _algo_config(algorithm: AlgorithmSection) -> Any:
    # A DictConfig: gdpo reads keys that verl's AlgoConfig lacks.
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {
            "gamma": 1.0,
            "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std,
            "gdpo_reward_keys": list(algorithm.gdpo_reward_terms),
        }
    )


def _on_last_token(rewards: Tensor, mask: Tensor, estimator: str) -> Tensor:
    # In float64, (B, T): float32 would round the mean of equal rewards, and give them advantages of about 1e-9 / (0 +
    # 1e-6). Token baselines accept only float32.
    import torch

    dtype = torch.float32 if estimator in NEEDS_LOG_PROBS else torch.float64
    token_level = torch.zeros_like(mask, dtype=dtype)
    last = mask.sum(-1).long().clamp(min=1) - 1
    token_level[torch.arange(mask.shape[0]), last] = rewards.to(dtype)
    return token_level


def _required(value: Any, estimator: str, name: str) -> Any:
    if value is None:
        raise LearnerError(
            f"algorithm.adv_estimator {estimator!r} needs the input {name!r}, which the caller did not give"
        )
    return value


def _names() -> str:
    return ", ".join(ADV_ESTIMATORS)
