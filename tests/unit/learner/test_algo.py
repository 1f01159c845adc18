"""Our estimators and losses are verl's own functions on the same numbers, under names that the CLI knows without
verl."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rayapp.config.algorithm import (
    ADV_ESTIMATORS,
    NEEDS_CRITIC,
    NEEDS_GREEDY_BASELINE,
    NEEDS_LOG_PROBS,
    POLICY_LOSSES,
    REJECTION_CRITERIA,
    AlgorithmSection,
    KlInRewardSection,
    options_of,
)
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, LearnerError
from rayapp.core.types import Reward, Trajectory
from rayapp.learner.algo.advantages import (
    AdvantageInputs,
    check_estimator,
    compute_advantages,
    kl_penalty_of,
    response_mask,
    token_kl,
)
from rayapp.learner.algo.losses import (
    LossRows,
    LossScale,
    Scored,
    aggregated,
    check_policy_loss,
    correction_weights,
    coupled_gradients,
    make_actor_config,
    mean_weight,
    policy_loss,
)
from rayapp.learner.batch import TrainItem, stack_rows
from rayapp.learner.metrics import mismatch_metrics

LENGTHS = np.array([3, 1, 2, 4])
SCALE = LossScale(num_tokens=10, num_trajectories=4, dp_size=1, max_response_tokens=8)


def actor_of(config: Config, scale: LossScale) -> Any:
    return make_actor_config(config.algorithm, scale, config.rollout.group_size)


def inputs(**changes: object) -> AdvantageInputs:
    rng = torch.Generator().manual_seed(0)
    values: dict[str, object] = {
        "rewards": np.array([1.0, 0.0, 0.5, 0.2], np.float32),
        "num_response_tokens": LENGTHS,
        "group_index": np.array([0, 0, 1, 1]),
        "reward_terms": {"pass_rate": np.array([1, 0, 1, 0], np.float32)},
        "baselines": np.array([0.5, 0.5, 0.1, 0.1], np.float32),
        "old_log_probs": -torch.rand(4, 4, generator=rng),
        "sum_pi_squared": torch.rand(4, 4, generator=rng),
    }
    return AdvantageInputs(**(values | changes))  # type: ignore[arg-type]


def loss_rows(log_probs: torch.Tensor, picked: slice = slice(None)) -> LossRows:
    rng = torch.Generator().manual_seed(1)
    old = -torch.rand(4, 4, generator=rng)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(4, 4)
    mask = response_mask(LENGTHS)
    return LossRows(
        log_probs=log_probs[picked],
        old_log_probs=old[picked],
        rollout_log_probs=(old + 0.01)[picked],
        advantages=(advantages * mask)[picked],
        mask=mask[picked],
    )


def test_the_names_are_verls_registries_without_critics() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

    assert set(ADV_ESTIMATORS) | set(NEEDS_CRITIC) == set(ADV_ESTIMATOR_REGISTRY)
    assert set(POLICY_LOSSES) == set(POLICY_LOSS_REGISTRY)
    assert set(REJECTION_CRITERIA) == SUPPORTED_ROLLOUT_RS_OPTIONS


def drawn_inputs(seed: int) -> AdvantageInputs:
    """Other rewards, lengths, baselines and probabilities."""
    numpy_rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    return inputs(
        rewards=numpy_rng.normal(size=4).astype(np.float32),
        num_response_tokens=numpy_rng.permutation(LENGTHS),
        reward_terms={"pass_rate": numpy_rng.random(4).astype(np.float32)},
        baselines=numpy_rng.normal(size=4).astype(np.float32),
        old_log_probs=-3 * torch.rand(4, 4, generator=torch_rng),
        sum_pi_squared=torch.rand(4, 4, generator=torch_rng),
    )


def verls_batch(name: str, given: AdvantageInputs, **more: torch.Tensor) -> Any:
    """These rows as the DataProto of verl's trainer."""
    from verl import DataProto

    lengths = given.num_response_tokens
    mask, scores = response_mask(lengths), torch.zeros(4, 4)
    scores[torch.arange(4), torch.from_numpy(lengths) - 1] = torch.from_numpy(given.rewards)
    assert given.baselines is not None
    return DataProto.from_single_dict(
        {
            "responses": torch.zeros(4, 4, dtype=torch.long),
            "response_mask": mask,
            "attention_mask": mask.long(),
            "prompts": torch.zeros(4, 0, dtype=torch.long),
            "token_level_rewards": scores,
            "token_level_scores": scores,
            **({"reward_baselines": torch.from_numpy(given.baselines)} if name in NEEDS_GREEDY_BASELINE else {}),
            "old_log_probs": given.old_log_probs,
            "sum_pi_squared": given.sum_pi_squared,
            "uid": np.array(["a", "a", "b", "b"], dtype=object),
            **given.reward_terms,
            **more,
        }
    )


def verls_own(name: str, algorithm: AlgorithmSection, data: Any) -> torch.Tensor:
    """What verl's trainer computes (compute_advantage in trainer/ppo/ray_trainer.py) from these rows."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.ray_trainer import compute_advantage

    config = AlgoConfig(
        adv_estimator=name,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std,
        gdpo_reward_keys=list(algorithm.gdpo_reward_terms),
    )
    result = compute_advantage(
        data,
        adv_estimator=name,
        gamma=1.0,
        num_repeat=2,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std,
        config=config,
    )
    advantages: torch.Tensor = result.batch["advantages"]
    return advantages


def gdpo_without_deviations(given: AdvantageInputs) -> torch.Tensor:
    """Return the only term minus its group's mean, on every token, whitened over all tokens (arXiv:2601.05242)."""
    from verl.utils.torch_functional import masked_whiten

    term, mask = given.reward_terms["pass_rate"], response_mask(given.num_response_tokens)
    centred = torch.tensor([term[i] - term[given.group_index == given.group_index[i]].mean() for i in range(4)])
    return masked_whiten(centred[:, None] * mask, mask) * mask


@pytest.mark.parametrize("norm_adv_by_std", [True, False])
@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_every_estimator_is_verls_own_on_the_same_numbers(name: str, *, norm_adv_by_std: bool) -> None:
    terms = {"gdpo_reward_terms": ["pass_rate"]} if name == "gdpo" else {}
    algorithm = AlgorithmSection(adv_estimator=name, norm_adv_by_std=norm_adv_by_std, **terms)
    # verl's trainer hands norm_adv_by_std neither to grpo_vectorized, which is grpo in other words, nor to gdpo.
    other = "grpo" if name == "grpo_vectorized" else name
    is_by_hand = name == "gdpo" and not norm_adv_by_std
    for given in (inputs(), *(drawn_inputs(seed) for seed in range(5))):
        found = compute_advantages(given, algorithm)
        expected = (
            gdpo_without_deviations(given) if is_by_hand else verls_own(other, algorithm, verls_batch(other, given))
        )
        mask = response_mask(given.num_response_tokens)
        # Ours may add in float64 where verl adds in float32: 7 digits, and a division by deviations of 0.1 and more.
        np.testing.assert_allclose((found * mask).numpy(), (expected * mask).numpy(), rtol=5e-5, atol=5e-6)


@pytest.mark.parametrize("kind", get_args(KlInRewardSection.model_fields["type"].annotation))
@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "remax", "rloo"])
def test_a_kl_in_the_reward_gives_the_advantages_of_verl(name: str, kind: str) -> None:
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    section = KlInRewardSection(coef=0.3, type=kind)  # type: ignore[arg-type]
    given = drawn_inputs(1)
    mask, lengths = response_mask(given.num_response_tokens), given.num_response_tokens
    reference = -3 * torch.rand(4, 4, generator=torch.Generator().manual_seed(9))
    old = given.old_log_probs
    assert old is not None
    rows = [token_kl(old[i, :size].numpy(), reference[i, :size].numpy(), section) for i, size in enumerate(lengths)]

    penalty = kl_penalty_of(stack_rows(rows, 4), lengths, section.coef)
    found = compute_advantages(replace(given, kl_penalty=penalty.rewards), AlgorithmSection(adv_estimator=name))

    controller = FixedKLController(kl_coef=0.3)
    batch = verls_batch(name, given, ref_log_prob=reference)
    data, metrics = apply_kl_penalty(batch, controller, kl_penalty="kl" if kind == "k1" else kind)
    torch.testing.assert_close(found * mask, verls_own(name, AlgorithmSection(), data) * mask, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, compute_advantages(given, AlgorithmSection(adv_estimator=name)), atol=1e-3)
    assert penalty.mean_kl == pytest.approx(metrics["actor/reward_kl_penalty"], rel=1e-5)


@pytest.mark.parametrize("name", NEEDS_LOG_PROBS)
def test_token_baselines_read_the_importance_weights_as_verl_does(name: str) -> None:
    weights = 0.2 + 2 * torch.rand(4, 4, generator=torch.Generator().manual_seed(5))
    given, algorithm = replace(inputs(), is_weights=weights), AlgorithmSection(adv_estimator=name)
    expected = verls_own(name, algorithm, verls_batch(name, given, rollout_is_weights=weights))

    mask = response_mask(LENGTHS)
    found, plain = (compute_advantages(each, algorithm) * mask for each in (given, inputs()))
    np.testing.assert_allclose(found.numpy(), (expected * mask).numpy(), rtol=5e-5, atol=5e-6)
    assert not torch.allclose(found, plain, atol=1e-3)


def test_grpo_is_reward_minus_mean_over_deviation_and_dr_grpo_without_it() -> None:
    advantages = compute_advantages(inputs(), AlgorithmSection(adv_estimator="grpo"))
    # group 0: rewards 1, 0: mean 0.5, deviation sqrt(0.5) = 0.70711 -> +-0.70711; on each of the row's own tokens
    np.testing.assert_allclose(advantages[0].numpy(), [0.70711, 0.70711, 0.70711, 0.0], atol=1e-4)
    np.testing.assert_allclose(advantages[1].numpy(), [-0.70711, 0.0, 0.0, 0.0], atol=1e-4)
    without = compute_advantages(inputs(), AlgorithmSection(adv_estimator="grpo", norm_adv_by_std=False))
    # group 1: rewards 0.5, 0.2: mean 0.35
    np.testing.assert_allclose(without[:, 0].numpy(), [0.5, -0.5, 0.15, -0.15], atol=1e-6)


@pytest.mark.parametrize("reward", [0.1, -0.3, 1 / 3])
def test_a_group_of_equal_rewards_has_exactly_no_advantage(reward: float) -> None:
    # The float32 mean of sixteen 0.1 is not 0.1, and the difference over a deviation of 0 + 1e-6 is not small.
    inputs = AdvantageInputs(
        rewards=np.full(16, reward, np.float32),
        num_response_tokens=np.full(16, 3),
        group_index=np.zeros(16, np.int64),
        reward_terms={},
    )
    assert not compute_advantages(inputs, AlgorithmSection(adv_estimator="grpo")).any()


def test_gdpo_normalises_the_terms_it_is_told_to() -> None:
    total = compute_advantages(inputs(), AlgorithmSection(adv_estimator="gdpo"))
    terms = compute_advantages(inputs(), AlgorithmSection(adv_estimator="gdpo", gdpo_reward_terms=("pass_rate",)))
    assert torch.isfinite(total).all()
    # pass_rate is 1, 0, 1, 0: each group alike, so the first of each is equally good
    np.testing.assert_allclose(float(terms[0, 0]), float(terms[2, 0]), rtol=1e-5)
    with pytest.raises(ConfigError, match=r"names speed, but some rewards lack these terms.*: pass_rate"):
        compute_advantages(inputs(), AlgorithmSection(adv_estimator="gdpo", gdpo_reward_terms=("speed",)))


def test_a_reward_that_is_not_finite_never_reaches_the_optimizer() -> None:
    rewards = np.array([1.0, np.nan, 0.5, 0.2], np.float32)
    with pytest.raises(LearnerError, match="rewards must be finite"):
        compute_advantages(inputs(rewards=rewards), AlgorithmSection())


def test_a_critic_and_an_unknown_name_are_refused_with_the_names_that_work() -> None:
    with pytest.raises(ConfigError, match=r"'gae' needs a critic.*rloo"):
        check_estimator("gae")
    with pytest.raises(ConfigError, match=r"'grppo' is neither an estimator of verl.*grpo"):
        check_estimator("grppo")
    with pytest.raises(ConfigError, match=r"'ppo' is neither a policy loss of verl.*vanilla"):
        check_policy_loss("ppo")


def loss_config(name: str, mode: str, **given: Any) -> Config:
    options = given or ({"dro_beta": 0.1} if name == "dro" else {})
    return Config.model_validate(
        {"algorithm": {"policy_loss": name, "policy_loss_options": options, "loss_agg_mode": mode}}
    )


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_and_its_gradient_are_verls_own_on_the_same_numbers(name: str, mode: str) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    config = loss_config(name, mode)
    actor = actor_of(config, SCALE)
    for seed in range(5):
        # From nearly equal policies to ratios of a hundred, so that every clip and bound is reached.
        spread = 0.05 * 3.0**seed
        log_probs = (-spread * torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))).requires_grad_()
        rows = loss_rows(log_probs)
        old = rows.rollout_log_probs if name == "bypass_mode" else rows.old_log_probs
        torch.manual_seed(seed)  # kl_cov and clip_cov draw tokens
        ours = policy_loss(rows, config.algorithm, actor, SCALE).loss
        torch.manual_seed(seed)
        theirs, _ = get_policy_loss_fn(name)(old, log_probs, rows.advantages, rows.mask, mode, actor, None)
        np.testing.assert_allclose(float(ours), float(theirs), rtol=1e-6)
        found, expected = (torch.autograd.grad(loss, log_probs, retain_graph=True)[0] for loss in (ours, theirs))
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-6, atol=1e-9)
        assert torch.isfinite(found).all()


SEPARABLE = [name for name in POLICY_LOSSES if name not in ("clip_cov", "kl_cov")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SEPARABLE)
def test_micro_batches_and_ranks_add_up_to_the_whole_batch(name: str, mode: str) -> None:
    config = loss_config(name, mode)
    log_probs = (-torch.rand(4, 4, generator=torch.Generator().manual_seed(2))).requires_grad_()
    whole = policy_loss(loss_rows(log_probs), config.algorithm, actor_of(config, SCALE), SCALE).loss
    (expected,) = torch.autograd.grad(whole, log_probs)
    two_ranks = LossScale(num_tokens=10, num_trajectories=4, dp_size=2, max_response_tokens=8)
    actor = actor_of(config, two_ranks)
    parts = [
        policy_loss(loss_rows(log_probs, picked), config.algorithm, actor, two_ranks).loss
        for picked in (slice(0, 1), slice(1, 4))
    ]
    # FSDP averages over the two ranks; micro-batches of one rank add up
    (found,) = torch.autograd.grad(sum(parts) / 2, log_probs)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


def gradient_of(config: Config, rows: LossRows, log_probs: torch.Tensor) -> torch.Tensor:
    loss = policy_loss(rows, config.algorithm, actor_of(config, SCALE), SCALE).loss
    return torch.autograd.grad(loss, log_probs)[0]


def test_importance_weights_scale_the_gradient_up_to_their_bound() -> None:
    corrected = Config.model_validate({"algorithm": {"rollout_correction": {"level": "token", "threshold": 2.0}}})
    log_probs = loss_rows(torch.zeros(4, 4)).old_log_probs.clone().requires_grad_()
    # The engine was less sure by 0.5 in the first column, and by 1 in the others: weights e^0.5, and 2 for e^1.
    surer = torch.tensor([0.5, 1.0, 1.0, 1.0])
    rows = replace(loss_rows(log_probs), rollout_log_probs=log_probs.detach() - surer)
    plain, weighed = (gradient_of(config, rows, log_probs) for config in (Config(), corrected))
    expected = plain * torch.tensor([1.648721, 2.0, 2.0, 2.0])
    np.testing.assert_allclose(weighed.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_each_loss_says_whether_it_pulls_at_trajectories_without_an_advantage(name: str) -> None:
    config = loss_config(name, "token-mean")
    pulls = False
    for seed in range(5):
        log_probs = (-2 * torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))).requires_grad_()
        rows = replace(loss_rows(log_probs), advantages=torch.zeros(4, 4))
        pulls |= bool(gradient_of(config, rows, log_probs).any())
    known = POLICY_LOSSES[name]
    # Losses of the whole mini-batch select tokens by rows without an advantage, too.
    assert known.pulls_at_zero_advantage == (pulls or known.is_batch_coupled)


@pytest.mark.parametrize(("weight", "mean"), [(0.0, 1.0), (1e-9, 1.0), (0.5, 0.5)])
def test_weights_that_are_all_zero_are_not_normalised(weight: float, mean: float) -> None:
    given = {"rollout_correction": {"level": "token", "threshold": 2.0}}
    algorithm = Config.model_validate({"algorithm": given}).algorithm

    assert mean_weight(torch.full((2, 3), weight), torch.ones(2, 3), algorithm) == mean


def test_ppo_clips_at_the_configured_bounds() -> None:
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 1.5}
    config = Config.model_validate({"algorithm": clips})
    ratios, mask = torch.tensor([[0.8, 0.95, 1.25, 1.4, 1.6]]), torch.ones(1, 5)
    for advantage, slopes in ((1.0, [0.8, 0.95, 1.25, 0, 0]), (-1.0, [0, 0.95, 1.25, 1.4, 0])):
        log_probs = ratios.log().requires_grad_()
        zeros, worth = torch.zeros(1, 5), torch.full((1, 5), advantage)
        rows = LossRows(log_probs=log_probs, old_log_probs=zeros, rollout_log_probs=zeros, advantages=worth, mask=mask)
        # d loss / d log-prob = -A x ratio / tokens inside the clip, else 0; at A < 0 a ratio above c has no slope.
        expected = -advantage * torch.tensor([slopes]) / SCALE.num_tokens
        np.testing.assert_allclose(gradient_of(config, rows, log_probs).numpy(), expected.numpy(), rtol=1e-5)


def test_dr_grpo_divides_by_the_longest_response_that_the_configuration_allows() -> None:
    algorithm = Config.model_validate({"algorithm": {"loss_agg_mode": "seq-mean-token-sum-norm"}}).algorithm
    values, mask = torch.arange(12.0).reshape(3, 4), torch.ones(3, 4)
    # (0 + 1 + ... + 11) / 8 tokens / 4 trajectories of the step, whatever the micro-batch's width is.
    for width in (4, 6):
        wide = torch.nn.functional.pad(values, (0, width - 4)), torch.nn.functional.pad(mask, (0, width - 4))
        np.testing.assert_allclose(float(aggregated(*wide, algorithm, SCALE)), 66 / 8 / 4)


@pytest.mark.parametrize("size", [4, 6, 7, 12])
@pytest.mark.parametrize("values", [(0.1, 0.7), (1 / 3, 2 / 3, 0.3), (0.9, 0.2, 0.6, 0.4)])
def test_gdpo_gives_no_advantage_if_every_group_has_equal_terms(size: int, values: tuple[float, ...]) -> None:
    terms = np.repeat(np.array(values, np.float32), size)
    given = AdvantageInputs(
        rewards=terms,
        num_response_tokens=np.full(terms.size, 3),
        group_index=np.repeat(np.arange(len(values)), size),
        reward_terms={"pass_rate": terms, "other": terms[::-1].copy()},
    )
    for by_std in (True, False):
        algorithm = AlgorithmSection(
            adv_estimator="gdpo", gdpo_reward_terms=("pass_rate", "other"), norm_adv_by_std=by_std
        )
        assert not compute_advantages(given, algorithm).any()


def scored_rows(rows: LossRows, log_probs: torch.Tensor) -> list[Scored]:
    """These rows, without their padding."""
    scored = []
    for i, size in enumerate(LENGTHS):
        tokens = np.arange(size + 1, dtype=np.int32)
        trajectory = Trajectory.of_tokens(
            tokens,
            tokens > 0,
            reward=Reward(value=0.0),
            log_probs=np.append(0.0, rows.rollout_log_probs[i, :size]).astype(np.float32),
        )
        item = TrainItem(row=i, group=0, trajectory=trajectory, advantages=rows.advantages[i, :size].numpy())
        scored.append((item, log_probs[i, :size].numpy(), rows.old_log_probs[i, :size].numpy()))
    return scored


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_micro_batches_of_a_coupled_loss_add_up_to_its_value_and_gradient(name: str) -> None:
    config = loss_config(name, "token-mean")
    log_probs = -torch.rand(4, 4, generator=torch.Generator().manual_seed(2))
    actor = actor_of(config, SCALE)
    coupled = coupled_gradients(scored_rows(loss_rows(log_probs), log_probs), config.algorithm, actor, SCALE, seed=3)

    now = log_probs.clone().requires_grad_()
    torch.manual_seed(3)
    whole = policy_loss(loss_rows(now), config.algorithm, actor, SCALE).loss
    parts = [coupled.surrogate(now[picked], range(4)[picked]) for picked in (slice(0, 1), slice(1, 4))]
    np.testing.assert_allclose(sum(float(part.detach()) for part in parts), float(whole.detach()), rtol=1e-5)
    found, expected = (torch.autograd.grad(loss, now)[0] for loss in (sum(parts), whole))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-8)


def test_tokens_that_a_loss_draws_follow_its_seed_and_not_the_order_in_which_ranks_gave_their_rows() -> None:
    config = loss_config("clip_cov", "token-mean", clip_cov_ratio=0.5, clip_cov_lb=-9.0, clip_cov_ub=9.0)
    log_probs = -torch.rand(4, 4, generator=torch.Generator().manual_seed(2))
    scored, actor = scored_rows(loss_rows(log_probs), log_probs), actor_of(config, SCALE)

    def slopes(order: list[Scored], seed: int) -> list[float]:
        by_row = coupled_gradients(order, config.algorithm, actor, SCALE, seed=seed).slopes
        return np.concatenate([by_row[row] for row in range(4)]).tolist()

    first = slopes(scored, 3)
    assert slopes(scored[::-1], 3) == first
    assert any(slopes(scored, seed) != first for seed in (4, 5, 6))


def test_a_range_of_k1_bounds_the_engines_probability_over_the_learners() -> None:
    # learner/engine 0.25, 0.4, 1, 2.5, 4: under 0.5_5 the loss keeps 0.2 to 2, as verl does, unlike the weights.
    options = {"loss_type": "reinforce", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_5"}
    config = loss_config("bypass_mode", "token-mean", **options)
    log_probs = torch.tensor([[0.25, 0.4, 1.0, 2.5, 4.0]]).log().requires_grad_()
    zeros, ones = torch.zeros(1, 5), torch.ones(1, 5)
    rows = LossRows(log_probs=log_probs, old_log_probs=zeros, rollout_log_probs=zeros, advantages=ones, mask=ones)
    assert gradient_of(config, rows, log_probs)[0].ne(0).tolist() == [True, True, True, False, False]


def test_weights_outside_of_two_bounds_are_zero() -> None:
    section = {"level": "token", "threshold": 2.0, "min_weight": 0.5}
    algorithm = Config.model_validate({"algorithm": {"rollout_correction": section}}).algorithm
    log_ratio = torch.log(torch.tensor([[0.4, 0.6, 1.9, 2.1]]))

    weights = correction_weights(log_ratio, torch.zeros(1, 4), torch.ones(1, 4), algorithm)

    assert weights is not None
    np.testing.assert_allclose(weights.numpy(), [[0.0, 0.6, 1.9, 0.0]], rtol=1e-6)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss_type": ({}, {"loss_type": "reinforce"}),
    "rollout_rs": ({}, {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.99_1.01"}),
    "rollout_rs_threshold": (
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.01_100"},
        {"rollout_rs_threshold": "0.99_1.01"},
    ),
    "clip_cov_lb": ({"clip_cov_ratio": 0.9, "clip_cov_lb": 0.0}, {"clip_cov_lb": 4.0}),
    "clip_cov_ub": ({"clip_cov_ratio": 0.9, "clip_cov_lb": 0.0}, {"clip_cov_ub": 0.0}),
    "clip_cov_ratio": ({"clip_cov_ratio": 0.1, "clip_cov_lb": -9.0}, {"clip_cov_ratio": 0.9}),
    "dro_beta": ({"dro_beta": 0.1}, {"dro_beta": 0.7}),
    "kl_cov_ratio": ({"kl_cov_ratio": 0.1}, {"kl_cov_ratio": 0.9}),
    "ppo_kl_coef": ({"kl_cov_ratio": 0.9}, {"ppo_kl_coef": 3.0}),
    "tau_neg": ({}, {"tau_neg": 3.0}),
    "tau_pos": ({}, {"tau_pos": 3.0}),
}
"""Two settings that differ in an option."""


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in POLICY_LOSSES for option in options_of(name)])
def test_an_option_that_a_loss_accepts_changes_its_gradient(name: str, option: str) -> None:
    base, change = CHANGES[option]
    gradients = []
    for options in (base, base | change):
        log_probs = (-torch.rand(4, 4, generator=torch.Generator().manual_seed(2))).requires_grad_()
        config = Config.model_validate({"algorithm": {"policy_loss": name, "policy_loss_options": options}})
        torch.manual_seed(0)  # kl_cov and clip_cov draw tokens
        gradients.append(gradient_of(config, loss_rows(log_probs), log_probs))
    assert not torch.equal(*gradients)


def test_an_option_that_the_loss_does_not_read_is_refused_when_the_configuration_is_read() -> None:
    for loss, options, why in (
        ("vanilla", {"rollout_rs": "token_k1"}, "does not read. vanilla reads no opt"),
        ("vanilla", {"tau_pos": 3.0}, "tau_pos belongs to sapo"),
        ("bypass_mode", {"rollout_is_batch_normalize": True}, "does not read"),  # it would depend on micro-batches
        ("bypass_mode", {"loss_type": "ppo"}, "use ppo_clip or reinforce"),
        ("bypass_mode", {"rollout_rs": "token_k1"}, "has rollout_rs without rollout_rs_threshold"),
        ("bypass_mode", {"rollout_rs": "token_k9", "rollout_rs_threshold": 2}, "use one of token_k1"),
        ("bypass_mode", {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "must be a number above 0"),
        ("clip_cov", {"clip_cov_ratio": "many"}, "must be a number"),
        ("dro", {}, "dro_beta above 0"),
    ):
        with pytest.raises(ValidationError, match=re.escape(why)):
            Config.model_validate({"algorithm": {"policy_loss": loss, "policy_loss_options": options}})


def test_mismatch_is_measured_on_response_tokens_only() -> None:
    mask = response_mask(np.array([1, 2]))
    learner = torch.tensor([[-1.0, 9.0], [-2.0, -3.0]])
    metrics = mismatch_metrics(learner, torch.tensor([[-1.0, 0.0], [-2.0, -3.5]]), mask)
    # the only difference: |exp(-3) - exp(-3.5)| = 0.049787 - 0.030197, over three tokens
    np.testing.assert_allclose(metrics["rollout_probs_diff/max"], 0.019590, atol=1e-6)
    np.testing.assert_allclose(metrics["rollout_probs_diff/mean"], 0.019590 / 3, atol=1e-6)
