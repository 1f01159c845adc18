"""Steps of one learner: what it skips, recomputes and reports, and that a checkpoint changes nothing."""

from __future__ import annotations

import gzip
import json
import math
import re
import resource
import shutil
import time
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as write
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from actors.learner import Learner
from rayapp.config.algorithm import AlgorithmSection
from rayapp.config.config import with_values
from rayapp.config.learner import OptimizerSection
from rayapp.core.errors import CheckpointDamagedError, CheckpointError, InputError, LearnerError
from rayapp.core.timing import MOST_MICRO_BATCHES
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, Reward, RolloutStatus
from rayapp.engine.weights.buckets import unpack
from rayapp.learner.algo.advantages import AdvantageInputs, compute_advantages
from rayapp.learner.memory.idle import moments_of, weights_of
from rayapp.learner.memory.shape import GPUS, model_shape
from rayapp.learner.metrics import MfuMeter
from rayapp.learner.policy import clip_gradients, learning_rate
from rayapp.learner.shares import Share
from rayapp.learner.state.checkpoint import _state
from support import make
from support.learners import save_llama, whole_weights

GROUP_SIZE = 4


def make_group(group_id: int, *, rewards: list[float] | None = None) -> Group:
    """Four completions of one prompt; the first two begin alike."""
    rng = np.random.default_rng(group_id)
    prompt, begin = rng.integers(2, 90, 6), rng.integers(2, 90, 4)
    values = rewards if rewards is not None else rng.normal(size=GROUP_SIZE).tolist()
    trajectories = []
    for i, value in enumerate(values):
        rest = rng.integers(2, 90, rng.integers(1, 8))
        tokens = np.concatenate([prompt, begin, rest] if i < 2 else [prompt, rest])
        terms = {"solved": float(value > 0)}
        trajectories.append(make.trajectory(tokens, prompt.size, reward=value, terms=terms, log_prob=-4.5))
    return make.group(*trajectories, group_id=group_id)


def learner_of(model: Path, changes: dict[str, Any] | None = None) -> AbstractContextManager[Learner]:
    """Return the context of a learner alone, in float32 on one thread."""
    usual: dict[str, Any] = {
        "rollout": {"group_size": GROUP_SIZE, "max_prompt_tokens": 16, "max_completion_tokens": 16},
        "train": {"num_steps": 4},
        "learner": {"max_tokens_per_microbatch": 64},
    }
    values = {name: usual.get(name, {}) | (changes or {}).get(name, {}) for name in usual | (changes or {})}
    own = values.pop("model", {})
    learner = Learner(with_values(make.config(model, **values), model=own), 0, 1, "", 0)
    learner.ready()
    return closing(learner)


def step(learner: Learner, number: int, groups: list[Group]) -> dict[str, float]:
    summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
    return learner.train_step(number, summaries, (tuple(map(Share, range(len(groups)))),), *groups)


def weights(learner: Learner) -> dict[str, np.ndarray]:
    return whole_weights(learner._learner)


def save(learner: Learner, folder: str, version: int) -> None:
    """A checkpoint, waited for."""
    learner.begin_checkpoint(folder, version)
    while not learner.checkpoint_done():
        time.sleep(0.01)


def two_groups(first: int = 0) -> list[Group]:
    return [make_group(first), make_group(first + 1)]


def test_on_policy_the_update_gives_the_old_log_probs_itself_and_the_stretches_of_a_step_add_up(
    tiny_model: Path,
) -> None:
    with learner_of(tiny_model) as learner:
        metrics = step(learner, 1, two_groups())

    assert metrics["timing_s/learner/old_log_probs"] == 0.0
    assert metrics["timing_s/learner/ref"] == 0.0
    assert metrics["learner/ratio_min"] == metrics["learner/ratio_max"] == 1.0
    assert metrics["learner/share_computed"] == 1.0
    assert metrics["learner/tokens_shared"] > 0
    # rollout log-probs of -4.5 are those of a uniform choice among 90: about what random weights give among 97 letters
    assert metrics["rollout_probs_diff/mean"] < 0.02
    assert 4.0 < metrics["learner/entropy"] < 4.6
    timings = {name: value for name, value in metrics.items() if name.startswith("timing_s/learner/")}
    total = timings.pop("timing_s/learner/total")
    assert sum(timings.values()) == pytest.approx(total, rel=1e-6)
    assert timings["timing_s/learner/other"] < 0.5 * total


@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_step_tells_what_its_first_weights_thought_of_every_sampled_token(
    tiny_model: Path, num_minibatches: int
) -> None:
    changes = {"train": {"num_minibatches": num_minibatches}, "learner": {"optimizer": {"lr": 1e-3}}}
    groups = two_groups()
    with learner_of(tiny_model, changes) as learner:
        expected = [log_probs for group in groups for log_probs in learner.log_probs_of(group)]
        metrics = step(learner, 1, groups)
        found = learner.log_probs_before()
        assert learner._learner.optimizer_steps == num_minibatches

    assert sorted(found) == list(range(len(expected)))
    for row, log_probs in enumerate(expected):
        np.testing.assert_allclose(found[row], log_probs, atol=1e-5)
    if num_minibatches == 2:  # the second sees the first one's update
        assert metrics["timing_s/learner/old_log_probs"] > 0.0
        assert metrics["learner/ratio_min"] < 1.0 < metrics["learner/ratio_max"]


def test_a_step_tells_before_each_micro_batch_how_many_are_done(tiny_model: Path) -> None:
    told = list[tuple[int, int]]()
    with learner_of(tiny_model, {"learner": {"max_tokens_per_microbatch": 40}}) as learner:
        learner._learner.on_micro_batch = lambda num_done, num_all: told.append((num_done, num_all))
        step(learner, 1, two_groups())

    num_all = told[0][1]
    assert num_all > 1
    assert told == [(number, num_all) for number in range(num_all)]


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_the_mfu_counts_a_steps_tokens_by_hand(tiny_model: Path, *, share_prefixes: bool) -> None:
    with learner_of(tiny_model, {"learner": {"share_prefixes": share_prefixes}}) as learner:
        assert not any(name.startswith("perf/") for name in step(learner, 1, two_groups()))  # a CPU has no peak
        own = learner._learner
        own.mfu = MfuMeter(shape=model_shape(own.config), gpu=replace(GPUS["h100"], tflops=0.5), num_gpus=2)
        metrics = step(learner, 2, two_groups())
        shape = own.mfu.shape
    sizes = [t.token_ids.size - 1 for group in two_groups() for t in group.trajectories]  # the last is only a target
    layers, head = shape.num_layers * shape.num_layer_parameters, shape.vocabulary * shape.hidden
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_size * sum(n * (n + 1) / 2 for n in sizes)
    flops = 3 * (2 * (layers + head) * sum(sizes) + attention)
    at_peak = metrics["timing_s/learner/forward_backward"] * 2 * 0.5e12
    assert metrics["perf/mfu_unshared"] == pytest.approx(flops / at_peak)
    if share_prefixes:
        assert metrics["perf/mfu"] < 0.8 * metrics["perf/mfu_unshared"]
    else:
        predicted = metrics["learner/tokens_trained"]
        assert metrics["perf/mfu"] == pytest.approx((flops - 6 * head * (sum(sizes) - predicted)) / at_peak)
    assert metrics["perf/tflops_per_gpu"] == pytest.approx(metrics["perf/mfu"] * 0.5)


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "clip_cov", "bypass_mode"])
def test_off_policy_a_loss_gives_the_same_step_however_it_is_split(tiny_model: Path, loss: str) -> None:
    changes: dict[str, Any] = {
        "algorithm": {"policy_loss": loss},
        "train": {"num_minibatches": 2},
        "learner": {"optimizer": {"lr": 1e-3}},
    }
    results = []
    for max_tokens in (512, 32):
        with learner_of(
            tiny_model, changes | {"learner": changes["learner"] | {"max_tokens_per_microbatch": max_tokens}}
        ) as learner:
            learner._learner.optimizer = torch.optim.SGD(learner._learner.model.parameters(), lr=0.1)  # type: ignore[assignment]
            metrics = step(learner, 1, two_groups() + two_groups(2))
            results.append((metrics["learner/num_microbatches"], weights(learner)))
    assert results[0][0] < results[1][0]
    for name, whole in results[0][1].items():
        np.testing.assert_allclose(results[1][1][name], whole, atol=2e-7, err_msg=name)


@pytest.mark.parametrize("estimator", ["grpo", "remax", "gdpo", "optimal_token_baseline"])
def test_estimators_of_every_kind_train(tiny_model: Path, estimator: str) -> None:
    with learner_of(tiny_model, {"algorithm": {"adv_estimator": estimator}}) as learner:
        metrics = step(learner, 1, two_groups())
    assert metrics["learner/grad_norm"] > 0
    assert metrics["learner/skipped_steps"] == 0
    # remax takes the last trajectory of each group for its baseline
    assert metrics["learner/num_trajectories"] == (6 if estimator == "remax" else 8)


@pytest.mark.parametrize("batch_normalize", [False, True])
def test_token_baselines_are_given_the_weights_between_learner_and_engine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, *, batch_normalize: bool
) -> None:
    seen: list[AdvantageInputs] = []

    def noted(inputs: AdvantageInputs, algorithm: AlgorithmSection) -> torch.Tensor:
        seen.append(inputs)
        return compute_advantages(inputs, algorithm)

    monkeypatch.setattr("rayapp.learner.step_plan.compute_advantages", noted)
    correction = {"level": "token", "threshold": 1.05, "batch_normalize": batch_normalize}
    groups = two_groups()
    with learner_of(
        tiny_model, {"algorithm": {"adv_estimator": "optimal_token_baseline", "rollout_correction": correction}}
    ) as learner:
        own = [row for group in groups for row in learner.log_probs_of(group)]
        step(learner, 1, groups)
    found = seen[0].is_weights
    assert found is not None
    expected = [np.minimum(np.exp(log_probs + 4.5), 1.05) for log_probs in own]  # the engine said -4.5 for every token
    mean = np.concatenate(expected).mean() if batch_normalize else 1.0
    for weights_of_row, row in zip(found, expected, strict=True):
        np.testing.assert_allclose(weights_of_row[: len(row)].numpy(), row / mean, rtol=1e-4)


def test_the_reference_is_where_training_began(tiny_model: Path) -> None:
    changes = {"algorithm": {"kl_loss_coef": 0.1}, "learner": {"optimizer": {"lr": 1e-3}}}
    with learner_of(tiny_model, changes) as learner:
        first, second = (step(learner, number, two_groups()) for number in (1, 2))
    assert first["learner/kl_to_reference"] == pytest.approx(0.0, abs=1e-7)
    assert second["learner/kl_to_reference"] > 1e-6
    assert first["timing_s/learner/ref"] > 0


def test_a_kl_in_the_reward_trains_groups_of_equal_rewards_and_scores_no_more_than_it_needs(tiny_model: Path) -> None:
    kl = {"coef": 0.5, "type": "k3"}
    equal = [make_group(0, rewards=[1.0] * GROUP_SIZE)]
    for loss, is_bypass in (("vanilla", False), ("bypass_mode", True)):
        changes = {
            "algorithm": {"adv_estimator": "rloo", "kl_in_reward": kl, "policy_loss": loss},
            "learner": {"optimizer": {"lr": 1e-3}},
        }
        with learner_of(tiny_model, changes) as learner:
            first, second = step(learner, 1, two_groups()), step(learner, 2, equal)
        # The engine said -4.5 of every token: in bypass mode that is the policy, and far from the reference.
        assert (first["learner/reward_kl_penalty"] > 1e-3) == is_bypass
        assert (first["timing_s/learner/old_log_probs"] == 0.0) == is_bypass
        assert second["learner/reward_kl_penalty"] > 1e-6
        assert second["learner/grad_norm"] > 0.0


def test_groups_of_one_train_where_nothing_is_compared(tiny_model: Path) -> None:
    changes = {"algorithm": {"adv_estimator": "reinforce_plus_plus"}}
    alone = {"rollout": {"group_size": 1}, "learner": {"max_tokens_per_microbatch": 512}}
    with learner_of(tiny_model, changes | alone) as learner:
        metrics = step(learner, 1, [make_group(number, rewards=[float(number)]) for number in range(3)])
    assert metrics["learner/num_trajectories"] == 3
    assert metrics["learner/zero_variance_groups"] == 0.0
    assert metrics["learner/grad_norm"] > 0.0


@pytest.mark.parametrize(
    ("kl", "kl_over", "loss"),
    [
        ("reverse", "sampled", "vanilla"),
        ("reverse", "sampled", "clip_cov"),  # a loss of the whole mini-batch
        ("reverse", "vocabulary", "vanilla"),
        ("forward", "vocabulary", "vanilla"),
    ],
)
def test_steps_towards_a_teacher_lower_the_kl_to_it_whatever_the_rewards(
    tiny_model: Path, tmp_path: Path, kl: str, kl_over: str, loss: str
) -> None:
    teacher = Path(shutil.copytree(tiny_model, tmp_path / "teacher"))
    save_llama(teacher, vocab_size=97, hidden_size=64, initializer_range=0.2)
    section = {"teacher": str(teacher), "reward_weight": 0.0, "kl": kl, "kl_over": kl_over}
    changes = {
        "distillation": section,
        "learner": {"optimizer": {"lr": 3e-3}},
        "train": {"num_steps": 8},
        "algorithm": {"policy_loss": loss},
    }
    group = make_group(0, rewards=[0.5] * GROUP_SIZE)
    with learner_of(tiny_model, changes) as learner:
        found = [step(learner, number, [group]) for number in range(1, 9)]
        weighed = [t.response_mask.sum() for t in group.trajectories]
    assert found[-1]["distillation/kl"] < 0.85 * found[0]["distillation/kl"]
    assert found[0]["learner/tokens_trained"] == sum(weighed)
    assert found[0]["learner/share_computed"] == 1.0


def test_the_entropy_bonus_raises_entropy(tiny_model: Path) -> None:
    entropies = {}
    for coefficient in (0.0, 10.0):
        changes = {"algorithm": {"entropy_coef": coefficient}, "learner": {"optimizer": {"lr": 1e-3}}}
        with learner_of(tiny_model, changes) as learner:
            step(learner, 1, two_groups())
            entropies[coefficient] = step(learner, 2, two_groups())["learner/entropy"]
    assert entropies[10.0] > entropies[0.0] + 1e-4


def test_groups_without_variance_are_not_computed_but_counted(tiny_model: Path) -> None:
    groups = [make_group(0), make_group(1, rewards=[0.5] * GROUP_SIZE)]
    with learner_of(tiny_model) as learner:
        metrics = step(learner, 1, groups)
    trained = [sum(t.num_response_tokens for t in group.trajectories) for group in groups]
    assert metrics["learner/zero_variance_groups"] == 0.5
    assert metrics["learner/tokens_trained"] == sum(trained)
    assert metrics["learner/share_computed"] == pytest.approx(trained[0] / sum(trained))


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_group_with_a_reward_that_is_not_finite_is_left_out_alone_and_named(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, reward: float
) -> None:
    groups = [make_group(0), make_group(1, rewards=[0.5, reward, 0.1, 0.2])]
    found = []
    for trained in (groups, groups[:1]):
        with learner_of(tiny_model) as learner:
            metrics = step(learner, 3, trained)
            found.append((metrics["learner/groups_not_finite"], metrics["learner/loss"], weights(learner)))
    assert [count for count, _, _ in found] == [1.0, 0.0]
    assert "step 3 leaves out groups [1], because their rewards are not finite" in caplog.text
    assert found[0][1] == found[1][1]
    assert all((found[0][2][name] == found[1][2][name]).all() for name in found[0][2])


def test_a_step_that_trains_on_nothing_moves_no_weights_whatever_the_momentum(tiny_model: Path) -> None:
    with learner_of(tiny_model, {"learner": {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}}}) as learner:
        step(learner, 1, two_groups())
        before = weights(learner)
        metrics = step(learner, 2, [make_group(0, rewards=[math.nan] * GROUP_SIZE)])
        after = weights(learner)
        assert learner._learner.optimizer_steps == 2
    assert metrics["learner/skipped_steps"] == 1
    assert all((before[name] == after[name]).all() for name in before)


def test_matrices_without_a_gradient_decay_and_norms_do_not(tiny_model: Path) -> None:
    with learner_of(tiny_model, {"learner": {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}}}) as learner:
        before = weights(learner)
        learner._learner.update([0.0], 1)
        after = weights(learner)
    for name, weight in before.items():
        np.testing.assert_allclose(after[name], weight * (1 - 1e-3) if weight.ndim > 1 else weight, rtol=1e-6)


def test_a_gradient_above_the_bound_is_scaled_down_to_it(tiny_model: Path) -> None:
    with learner_of(tiny_model) as learner:
        model = learner._learner.model
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        norm = clip_gradients(model, 1e9)
        assert norm == pytest.approx(sum(parameter.numel() for parameter in model.parameters()) ** 0.5)
        clip_gradients(model, norm / 1.5)
        assert clip_gradients(model, 1e9) == pytest.approx(norm / 1.5, rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_alone(
    tiny_model: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    with learner_of(tiny_model) as learner:
        poisoned = next(learner._learner.model.parameters())
        with torch.no_grad():
            poisoned.to_local()[5, 0] = value  # type: ignore[attr-defined]
        before = weights(learner)
        metrics = step(learner, 1, [make_group(0)])
        after = weights(learner)
        assert not learner._learner.optimizer.state
    assert metrics["learner/skipped_steps"] == metrics["learner/skipped_steps_total"] == 1
    assert re.search(r"optimizer step 1 is skipped: gradient norm (nan|inf), losses \[", caplog.text)
    assert all(np.array_equal(before[name], after[name], equal_nan=True) for name in before)


def test_a_group_that_is_not_the_summarized_one_is_refused(tiny_model: Path) -> None:
    with learner_of(tiny_model) as learner:
        summaries = tuple(summarize_group(group, time_total_s=0.0) for group in two_groups())
        with pytest.raises(LearnerError, match="summaries and groups don't match"):
            learner.train_step(1, summaries, ((Share(0), Share(1)),), *two_groups(2))


def test_a_checkpoint_is_of_the_step_it_began_after_and_goes_on_from_it_to_the_last_digit(
    tiny_model: Path, tmp_path: Path
) -> None:
    changes = {
        "algorithm": {"kl_in_reward": {"coef": 0.1}},
        "learner": {"optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2}},
        "checkpoint": {"save_contents": ["model", "optimizer", "hf_model"]},
    }
    folder = tmp_path / "checkpoint" / "learner"
    with learner_of(tiny_model, changes) as learner:
        for number in (1, 2):
            step(learner, number, two_groups(number))
        before = weights(learner)
        torch.rand(1)  # a plug-in's loss may draw
        learner.begin_checkpoint(str(folder), 2)
        drawn = torch.rand(3)
        expected = step(learner, 3, two_groups(3)), weights(learner)  # changes weights and moments in place
        while not learner.checkpoint_done():
            time.sleep(0.01)
        assert any((before[name] != expected[1][name]).any() for name in before)
    with learner_of(tiny_model, changes) as learner:
        assert learner.load_checkpoint(str(folder)) == 2
        assert torch.equal(torch.rand(3), drawn)
        assert all((weights(learner)[name] == before[name]).all() for name in before)
        found = step(learner, 3, two_groups(3)), weights(learner)

    told = [
        {key: value for key, value in one.items() if not key.startswith("timing_s/")} for one, _ in (found, expected)
    ]
    assert told[0] == told[1]
    assert all((found[1][name] == expected[1][name]).all() for name in expected[1])
    # ... and the Hugging Face folder is of the same step, in float32
    from safetensors.torch import load_file

    exported = load_file(folder.with_name("hf_model") / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, torch.from_numpy(before[f"causal_lm.{name}"])), name


def test_a_disk_that_is_full_is_named_when_the_save_is_asked_about(tiny_model: Path, tmp_path: Path) -> None:
    with learner_of(tiny_model) as learner:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # A limit on file sizes stands in for a disk without room: the same write fails at the same place.
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"can't be written: .*on a full disk: free some space"):
                save(learner, str(tmp_path / "c"), 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        save(learner, str(tmp_path / "later"), 1)  # with room again, the next one is written
        assert learner.load_checkpoint(str(tmp_path / "later")) == 1


def test_weights_that_are_not_finite_are_neither_saved_nor_loaded_nor_exported(
    tiny_model: Path, tmp_path: Path
) -> None:
    with learner_of(tiny_model) as learner:
        weight = next(learner._learner.model.parameters()).to_local().detach().view(-1)
        save(learner, str(tmp_path / "good"), 1)
        weight[7] = float("nan")
        with pytest.raises(CheckpointError, match=r"values that are not finite in model\..* No checkpoint"):
            save(learner, str(tmp_path / "nan"), 2)
        with pytest.raises(CheckpointError, match="is not written: it has values that are not finite in "):
            learner.export_hf(str(tmp_path / "hf"))
        assert not (tmp_path / "hf").exists()
        weight[7] = float("inf")
        # As versions before this check wrote it, or as damage leaves it.
        counters = {"counters": torch.zeros(3, dtype=torch.int64), "rng": torch.get_rng_state()}
        write(_state(learner._learner) | counters, checkpoint_id=tmp_path / "inf")
        with pytest.raises(CheckpointDamagedError, match=r"inf is damaged: it has values that are not finite"):
            learner.load_checkpoint(str(tmp_path / "inf"))
        assert learner.load_checkpoint(str(tmp_path / "good")) == 1  # training continues from the one before
        assert weight[7].isfinite()


def held_bytes(learner: Learner) -> int:
    """Memory of this learner's weights and of its optimizer's moments."""
    own = learner._learner
    tensors = [*weights_of(own.model, *own.frozen.values()), *moments_of(own.optimizer)]
    return sum(tensor.to_local().untyped_storage().nbytes() for tensor in tensors)  # type: ignore[attr-defined]


def test_a_learner_that_gives_its_memory_to_a_server_in_between_takes_the_same_steps(
    tiny_model: Path, tmp_path: Path
) -> None:
    def run(name: str, changes: dict[str, Any]) -> tuple[list[Any], list[int]]:
        settings = {"algorithm": {"kl_loss_coef": 0.1}, "learner": {"optimizer": {"lr": 1e-3}} | changes}
        settings |= {"distillation": {"teacher": str(tiny_model), "kl_over": "vocabulary"}}
        with learner_of(tiny_model, settings | {"cluster": {"placement": "colocated"}}) as learner:
            held = [held_bytes(learner)]
            found: list[Any] = [step(learner, 1, two_groups()), sent(learner)]
            held.append(held_bytes(learner))
            with pytest.MonkeyPatch.context() as patch:
                patch.delattr(learner._idle.__class__, "fetch")  # saving must not use the GPU memory
                save(learner, str(tmp_path / name), 1)
            found += [step(learner, 2, two_groups(2)), sent(learner)]
            assert learner.load_checkpoint(str(tmp_path / name)) == 1
            held.append(held_bytes(learner))
            found += [step(learner, 2, two_groups(2)), sent(learner), learner.log_probs_of(make_group(5))]
        return found, held

    kept, always = run("kept", {})
    given, between = run("given", {"offload_when_idle": True})
    assert min(always) > 0
    assert between == [0, 0, 0]
    for one, other in zip(given, kept, strict=True):
        if isinstance(one, list):
            assert all(np.array_equal(row, expected) for row, expected in zip(one, other, strict=True))
            continue
        for key, value in other.items():
            if not str(key).startswith("timing_s/"):
                assert torch.equal(torch.as_tensor(one[key]), torch.as_tensor(value)), key


def test_a_torn_checkpoint_and_a_folder_without_one_say_so(tiny_model: Path, tmp_path: Path) -> None:
    with learner_of(tiny_model) as learner:
        with pytest.raises(CheckpointError, match="can't be read into this model"):
            learner.load_checkpoint(str(tmp_path / "nothing"))
        save(learner, str(tmp_path / "torn"), 1)
        data = next((tmp_path / "torn").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
        with pytest.raises(CheckpointError, match="can't be read into this model"):
            learner.load_checkpoint(str(tmp_path / "torn"))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        # One layer less here: all of the state finds its tensors, and those of the second layer would be left over.
        ({"num_hidden_layers": 1}, r"layers\.1\..* is \(128,.*\) in the checkpoint and missing in the model"),
        ({"num_hidden_layers": 3}, r"layers\.2\..* is missing in the checkpoint and \(128,.*\) in the model"),
        ({"intermediate_size": 192}, r"is \((256, 128|128, 256)\) in the checkpoint and"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, changes: dict[str, int], difference: str
) -> None:
    read = AutoConfig.from_pretrained(tiny_model)
    for name, value in changes.items():
        setattr(read, name, value)
    AutoModelForCausalLM.from_config(read).save_pretrained(tmp_path / "other")
    with learner_of(tiny_model) as learner:
        save(learner, str(tmp_path / "c"), 1)
    with learner_of(tmp_path / "other") as learner:
        before = weights(learner)
        with pytest.raises(CheckpointError, match=r"can't be read into this model: .* tensors differ: ") as raised:
            learner.load_checkpoint(str(tmp_path / "c"))
        after = weights(learner)
    assert re.search(difference, str(raised.value))
    assert "Set the model.path with which it was saved" in str(raised.value)
    assert all((before[name] == after[name]).all() for name in before)


def test_the_exported_folder_computes_the_learners_log_probs(tiny_model: Path, tmp_path: Path) -> None:
    with learner_of(tiny_model, {"learner": {"optimizer": {"lr": 1e-3}}}) as learner:
        step(learner, 1, two_groups())
        learner.export_hf(str(tmp_path))
        found = learner.log_probs_of(make_group(5))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path).encode("a") == AutoTokenizer.from_pretrained(tiny_model).encode("a")
    for own, expected in zip(found, log_probs_under(model.float(), make_group(5)), strict=True):
        # the export rounds weights to bfloat16: 8 bits, in a model of two layers
        np.testing.assert_allclose(own, expected, atol=0.05)


def test_a_group_that_failed_as_a_whole_does_not_end_a_run_that_weighs_reward_terms(tiny_model: Path) -> None:
    failed = make_group(1)
    lost = [
        replace(t, reward=Reward.invalid("sandbox", "gone"), status=RolloutStatus.ERROR_SANDBOX)
        for t in failed.trajectories
    ]
    changes = {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_terms": ["solved"]}}
    with learner_of(tiny_model, changes) as learner:
        metrics = step(learner, 1, [make_group(0), replace(failed, trajectories=tuple(lost))])
    assert metrics["learner/num_trajectories"] == GROUP_SIZE
    assert metrics["learner/skipped_steps"] == 0


def test_a_mini_batch_that_is_not_finite_is_skipped_alone(tiny_model: Path) -> None:
    first = make_group(0)
    poisoned = [replace(t, rollout_log_probs=t.rollout_log_probs + np.float32(np.nan)) for t in first.trajectories]
    changes: dict[str, Any] = {
        "train": {"num_minibatches": 2},
        "algorithm": {"rollout_correction": {"level": "token"}},
        "learner": {"optimizer": {"lr": 1e-3}},
    }
    with learner_of(tiny_model, changes) as learner:
        before = weights(learner)
        metrics = step(learner, 1, [replace(first, trajectories=tuple(poisoned)), make_group(1)])
        after = weights(learner)
    assert metrics["learner/skipped_steps"] == 1
    assert any((before[name] != after[name]).any() for name in before)


def test_schedules_warm_up_and_end_where_they_should() -> None:
    linear = OptimizerSection(lr=1.0, schedule="linear", warmup_steps=2)
    assert [learning_rate(n, 4, linear) for n in range(1, 5)] == [0.5, 1.0, 1.0, 0.5]
    cosine = OptimizerSection(lr=1.0, schedule="cosine", min_lr_ratio=0.1)
    assert learning_rate(1, 1, cosine) == 1.0  # the only step of a run
    assert learning_rate(3, 4, cosine) == pytest.approx(0.55)  # half way: (1 + 0.1) / 2
    assert learning_rate(5, 4, cosine) == pytest.approx(0.1)
    assert learning_rate(99, 4, OptimizerSection(lr=1.0)) == 1.0


LORA = {"lora": {"rank": 4, "alpha": 8, "send": "merged"}, "optimizer": {"lr": 1e-2}}


def sent(learner: Learner) -> dict[str, torch.Tensor]:
    """What a server gets."""
    return {
        name: tensor.clone()
        for bucket in learner.export_weights(0, 1 << 20)
        for name, tensor in unpack(bucket.entries, torch.from_numpy(bucket.data))
    }


def test_adapters_are_trained_alone_and_what_is_sent_computes_the_learners_log_probs(
    tiny_model: Path, tmp_path: Path
) -> None:

    with learner_of(tiny_model, {"learner": LORA}) as learner:
        before, first = weights(learner), sent(learner)
        metrics = step(learner, 1, two_groups())
        after, second = weights(learner), sent(learner)
        group = two_groups()[0]
        found = learner.log_probs_of(group)
        learner.export_hf(str(tmp_path / "hf"))
    assert metrics["learner/grad_norm"] > 0
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed
    assert all(".lora_B." in name for name in changed)  # A has no gradient as long as B is 0: the first step moves B
    # The names are the model's own, and before the first step so are the weights.
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert first.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(first[name], p.detach().bfloat16()) for name, p in model.named_parameters())
    # A server that loads what is sent after the step follows the learner, up to the rounding of weights to bfloat16.
    base = log_probs_under(model, group)
    model.load_state_dict({name: tensor.float() for name, tensor in second.items()}, strict=False)
    follows = log_probs_under(model, group)
    for ours, theirs, old in zip(found, follows, base, strict=True):
        np.testing.assert_allclose(theirs, ours, atol=2e-2)
        assert np.abs(old - ours).max() > 10 * np.abs(theirs - ours).max()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(second[name].to(p.dtype), p.detach()) for name, p in exported.named_parameters())


def test_weights_under_adapters_and_of_a_reference_are_bfloat16_and_compute_the_same_numbers(tiny_model: Path) -> None:
    group, found = two_groups()[0], []
    for changes in ({}, {"lora": {"rank": 4}}):
        section = {"learner": changes | {"compute_dtype": "bfloat16", "cpu_threads": 1}}
        with learner_of(tiny_model, section | {"algorithm": {"kl_loss_coef": 0.1}}) as learner:
            model, reference = learner._learner.model, learner._learner.frozen["reference"]
            assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
            assert {p.dtype for p in (*model.parameters(), *reference.parameters()) if not p.requires_grad} == {
                torch.bfloat16
            }
            found.append(learner.log_probs_of(group))
            assert step(learner, 1, two_groups())["learner/kl_to_reference"] == 0.0
    assert all((plain == adapted).all() for plain, adapted in zip(*found, strict=True))


def test_the_adapters_alone_are_sent_and_give_the_learners_log_probs_in_peft(tiny_model: Path) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    lora = LORA["lora"] | {"send": "adapter"}
    changes = {"learner": LORA | {"lora": lora}}
    with learner_of(tiny_model, changes) as learner:
        for number in (1, 2):
            step(learner, number, two_groups(number))
        adapter, group = sent(learner), two_groups()[0]
        found = learner.log_probs_of(group)
        whole = sum(parameter.numel() for name, parameter in learner._learner.model.named_parameters())
    assert all(".lora_A.weight" in name or ".lora_B.weight" in name for name in adapter)
    # Rank 4 beside matrices of 128: see tests/unit/learner/test_memory_plan.py for the count.
    assert sum(tensor.numel() for tensor in adapter.values()) == 2 * 4 * (2 * 256 + 2 * 192 + 3 * 384) < whole / 10
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    base = log_probs_under(model, group)
    # What is sent has its scale in it: alpha is the rank.
    settings = LoraConfig(r=4, lora_alpha=4, target_modules="all-linear")
    wrapped = get_peft_model(model, settings)
    loaded = set_peft_model_state_dict(wrapped, {name: tensor.float() for name, tensor in adapter.items()})
    assert not loaded.unexpected_keys
    follows = log_probs_under(wrapped, group)
    for ours, theirs, old in zip(found, follows, base, strict=True):
        np.testing.assert_allclose(theirs, ours, atol=5e-3)  # the adapter's own rounding to bfloat16
        assert np.abs(old - ours).max() > 10 * np.abs(theirs - ours).max()


def log_probs_under(model: Any, group: Group) -> list[np.ndarray]:
    """Return the log-probs of each trajectory's response tokens, one sequence at a time."""
    found = []
    for trajectory in group.trajectories:
        ids = torch.from_numpy(trajectory.token_ids).long()[None]
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].float().log_softmax(-1)
        picked = scores.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        found.append(picked[trajectory.response_mask[1:]])
    return found


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_checkpoint_of_adapters_holds_them_alone_and_goes_on_to_the_last_digit(
    tiny_model: Path, tmp_path: Path, quantization: str
) -> None:
    changes = {"model": {"quantization": quantization}, "learner": LORA}
    with learner_of(tiny_model, changes) as learner:
        step(learner, 1, two_groups(1))
        save(learner, str(tmp_path / "c"), 1)
        step(learner, 2, two_groups(2))
        expected = weights(learner)
    size = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
    # Rank 4 a layer: q, o 2 x 4 x 256, k, v 2 x 4 x 192, MLP 3 x 4 x 384 = 8192 numbers. On 2 layers, with two moments,
    # in float32: 197 kB, and about 2 kB of DCP's own for each of 28 x 4 tensors; all 0.3M weights would take 3.6 MB.
    assert 196_608 <= size < 600_000
    with learner_of(tiny_model, changes) as learner:
        assert learner.load_checkpoint(str(tmp_path / "c")) == 1
        step(learner, 2, two_groups(2))
        found = weights(learner)
    assert all((found[name] == expected[name]).all() for name in expected)


def test_modules_that_the_model_lacks_are_named(tiny_model: Path) -> None:
    lora = {"rank": 4, "target_modules": ["no_such_proj"]}
    with pytest.raises(InputError, match="no_such_proj"), learner_of(tiny_model, {"learner": {"lora": lora}}):
        pass


def test_offloaded_to_the_host_a_step_is_the_same_to_the_last_digit(tiny_model: Path) -> None:
    results = []
    for cpu_offload in (False, True):
        changes = {"learner": {"max_tokens_per_microbatch": 32, "cpu_offload": cpu_offload}}
        with learner_of(tiny_model, changes) as learner:
            metrics = [step(learner, number, two_groups(number)) for number in (1, 2)]
            results.append((metrics, weights(learner)))
    (plain, plain_weights), (offloaded, offloaded_weights) = results
    assert [m["learner/grad_norm"] for m in plain] == [m["learner/grad_norm"] for m in offloaded]
    assert all((plain_weights[name] == offloaded_weights[name]).all() for name in plain_weights)


def test_a_profiled_step_leaves_a_trace_and_trains_alike(tiny_model: Path) -> None:
    groups = [make_group(number) for number in range(10)]
    changes: dict[str, Any] = {"learner": {"max_tokens_per_microbatch": 32}}
    after = []
    for profiled in ([], [2]):
        with learner_of(tiny_model, changes | {"train": {"num_steps": 4, "profile_steps": profiled}}) as learner:
            step(learner, 1, groups)
            assert learner.profile() is None
            metrics = step(learner, 2, groups)
            profile = learner.profile()
            after.append(weights(learner))

    assert all((after[0][name] == after[1][name]).all() for name in after[0])
    assert profile is not None
    num_batches = int(metrics["learner/num_microbatches"])
    assert num_batches > MOST_MICRO_BATCHES
    assert profile.covers == f"{MOST_MICRO_BATCHES} of {num_batches} micro-batches"
    events = json.loads(gzip.decompress(profile.trace))["traceEvents"]
    names = {event["name"] for event in events}
    assert {"aten::mm", "aten::addmm"} & names
    assert {"forward_backward", "optimizer"} <= names
