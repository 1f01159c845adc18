"""Every family of models in the table, tiny: the learner computes what transformers computes on padded rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from rayapp.core.errors import InputError, LearnerError
from rayapp.core.types import ExpertArray, Group, Int32Array
from rayapp.learner.families.mixers import mixers_of
from rayapp.learner.families.router_replay import EXPERTS, RouterReplay, check_replay
from rayapp.learner.family import _small_model, check_family
from rayapp.learner.state.export import export_hf, sent_weights, weight_shapes
from rayapp.learner.supervised import log_probs_of
from rayapp.storage.models.families import FAMILIES, TINY
from support import family_trial as trial
from support.family_check import VOCABULARY, plain_model, subject_of

pytestmark = pytest.mark.slow

BUFFERS = ("e_score_correction_bias", "expert_bias", "layer_scalar")
TRAINED = sorted(name for name, family in FAMILIES.items() if not family.refused)


@pytest.mark.parametrize("name", TRAINED)
def test_log_probs_and_gradients_of_a_family_are_those_of_plain_attention(name: str, tmp_path: Path) -> None:
    subject = subject_of(name)
    trial.save_tiny(subject.architecture, tmp_path)
    config, groups = trial.trial_config(tmp_path), trial.trial_groups(VOCABULARY)
    expected = trial.plain_scores(plain_model(tmp_path, config.max_model_tokens), groups)
    with trial.learner_of(config) as learner:
        found = trial.learner_scores(learner, groups)
        sent = dict(sent_weights(learner.model, config.learner.lora, [torch.bfloat16]))
        shapes = weight_shapes(learner.model)
        assert bool(mixers_of(learner.model)) == ("borders" in subject.family.needs)
    assert trial.log_prob_error(found, expected) < trial.MAX_LOG_PROB_ERROR
    assert trial.gradient_error(found, expected) < subject.max_gradient_error
    # Servers get what a checkpoint on the hub has, all but buffers, which nobody trains.
    hub = load_file(tmp_path / "model.safetensors")
    assert {name for name in hub.keys() - sent.keys() if not name.endswith(BUFFERS)} == set()
    assert all(torch.equal(hub[name], tensor) for name, tensor in sent.items())
    assert shapes == [(name, tensor.shape) for name, tensor in sent.items()]
    changes = {"share_prefixes": False, "activation_checkpointing": True, "lora": {"rank": 4}}
    with trial.learner_of(trial.trial_config(tmp_path, **changes)) as learner:
        found = trial.learner_scores(learner, groups)
        adapters = trial.adapter_gradients(learner, expected)
    assert adapters is not None
    assert trial.log_prob_error(found, expected) < trial.MAX_LOG_PROB_ERROR
    assert trial.gradient_error(found, adapters) < 2 * subject.max_gradient_error


VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
}
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"vision_config": VISION | {"image_size": 28}, "mm_tokens_per_image": 4}),
    "gemma4": ("gemma4_text", {"vision_config": VISION}),
    "qwen3_5": (
        "qwen3_5_text",
        {"vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}},
    ),
}
WITHOUT_TOWER = {"qwen3_5"}
"""Families of which transformers loads only the language model."""


@pytest.mark.parametrize("name", sorted(WITH_IMAGES))
def test_the_final_model_of_one_that_reads_pictures_reloads_with_its_tower_or_as_text_alone(
    name: str, tmp_path: Path
) -> None:
    kind, parts = WITH_IMAGES[name]
    first, final = tmp_path / "first", tmp_path / "final"
    trial.save_tiny(subject_of(kind).architecture, first)  # for its tokenizer
    text = TINY | {"vocab_size": VOCABULARY, "model_type": kind} | dict(FAMILIES[kind].tiny)
    whole = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[name](text_config=text, **parts))
    trial.randomize(whole, seed=0)
    whole.bfloat16().save_pretrained(first)
    (first / "preprocessor_config.json").write_text("{}")
    config = trial.trial_config(first)
    with trial.learner_of(config) as learner:
        assert {p.dtype for p in learner.model.parameters()} == {torch.float32}
        export_hf(config, learner.model, final, learner.ranks)

    tokens = torch.tensor([[2, 3, 4, 5, 6]])
    expected, found = (plain_model(folder, 64).float()(tokens).logits for folder in (first, final))
    assert torch.equal(expected, found)
    has_tower = any("vision" in key or "visual" in key for key in load_file(final / "model.safetensors"))
    assert has_tower == (final / "preprocessor_config.json").exists() == (name not in WITHOUT_TOWER)


NUM_EXPERTS, CHOSEN = 4, 2
Chosen = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def with_experts(groups: list[Group], experts_of: Callable[[int, Int32Array], ExpertArray]) -> list[Group]:
    """Return the groups with the experts that `experts_of(row, token_ids)` gives each trajectory."""
    return [
        replace(
            group,
            trajectories=tuple(
                replace(t, routed_experts=experts_of(row, t.token_ids)) for row, t in enumerate(group.trajectories)
            ),
        )
        for group in groups
    ]


def some_experts(num_layers: int) -> Callable[[int, Int32Array], ExpertArray]:
    """Return a function that chooses experts from each token and its prefix; in row 1 also from the row."""

    def experts_of(row: int, token_ids: Int32Array) -> ExpertArray:
        drawn = []
        for position in range(token_ids.size):
            seed = [*token_ids[: position + 1].tolist(), *([7] if row == 1 and position > 2 else [])]
            rng = np.random.default_rng(seed)
            drawn.append([rng.permutation(NUM_EXPERTS)[:CHOSEN] for _ in range(num_layers)])
        return np.array(drawn, np.uint8)

    return experts_of


def softmax_of_all(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1).gather(1, experts)


def softmax_of_chosen(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    return logits.gather(1, experts).softmax(-1)


def sigmoid_of_each(logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    weights = logits.sigmoid().gather(1, experts)
    return weights / weights.sum(1, keepdim=True)


ROUTED: dict[str, Chosen] = {
    "qwen3_moe": softmax_of_all,
    "olmoe": softmax_of_all,
    "mixtral": softmax_of_chosen,
    "gpt_oss": softmax_of_chosen,
    "glm4_moe": sigmoid_of_each,
}
"""Weight of each chosen expert, as the models' papers define it."""


def force(causal_lm: Any, groups: list[Group], weights_of: Chosen) -> None:
    """Make plain transformers' routers take the trajectories' experts, for padded rows of them."""
    rows = [t.routed_experts for group in groups for t in group.trajectories]
    width = max(len(row) for row in rows)
    padded = np.stack([np.pad(row, ((0, width - len(row)), (0, 0), (0, 0))) for row in rows]).astype(np.int64)
    scale = getattr(causal_lm.config, "routed_scaling_factor", 1.0)

    for number, layer in enumerate(causal_lm.model.layers):
        experts = torch.from_numpy(padded[:, :, number].reshape(-1, CHOSEN))
        block = layer.mlp
        router = getattr(block, "gate", None) or getattr(block, "router", None)
        if router is None:
            continue

        def forward(
            hidden: torch.Tensor, router: Any = router, experts: torch.Tensor = experts
        ) -> tuple[torch.Tensor, ...]:
            logits = torch.nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))
            return logits, weights_of(logits, experts), experts

        if hasattr(block, "route_tokens_to_experts"):
            block.route_tokens_to_experts = lambda logits, experts=experts: (
                experts,
                scale * weights_of(logits, experts),
            )
        else:
            router.forward = forward


@pytest.mark.parametrize("name", sorted(ROUTED))
def test_a_router_takes_the_experts_that_the_server_chose_and_weighs_them_itself(name: str, tmp_path: Path) -> None:
    subject = subject_of(name)
    trial.save_tiny(subject.architecture, tmp_path)
    groups = with_experts(trial.trial_groups(VOCABULARY), some_experts(subject.architecture.num_hidden_layers))
    plain = plain_model(tmp_path, 64)
    force(plain, groups, ROUTED[name])
    expected = trial.plain_scores(plain, groups)
    for changes in ({}, {"share_prefixes": False, "activation_checkpointing": True}):
        with trial.learner_of(trial.trial_config(tmp_path, router_replay=True, **changes)) as learner:
            found = trial.learner_scores(learner, groups)
        assert trial.log_prob_error(found, expected) < trial.MAX_LOG_PROB_ERROR
        assert trial.gradient_error(found, expected) < subject.max_gradient_error
    with trial.learner_of(trial.trial_config(tmp_path)) as learner:
        own = trial.learner_scores(learner, groups)
    assert trial.log_prob_error(own, expected) > 100 * trial.MAX_LOG_PROB_ERROR


REPLAYED = sorted(name for name in TRAINED if "experts" in FAMILIES[name].needs and name != "phimoe")


@pytest.mark.parametrize("name", [REPLAYED[0], *(pytest.param(name, marks=pytest.mark.long) for name in REPLAYED[1:])])
def test_experts_that_the_learner_would_have_chosen_change_no_bit(name: str, tmp_path: Path) -> None:
    subject = subject_of(name)
    trial.save_tiny(subject.architecture, tmp_path)
    config, groups = trial.trial_config(tmp_path, router_replay=True), trial.trial_groups(VOCABULARY)
    check_family(subject.architecture, config.model, config.learner, config.max_model_tokens)
    plain = plain_model(tmp_path, config.max_model_tokens)
    groups = with_experts(groups, own_experts(plain))
    with trial.learner_of(trial.trial_config(tmp_path)) as learner:
        without = trial.learner_scores(learner, groups)
    with trial.learner_of(config) as learner:
        found = trial.learner_scores(learner, groups)
        assert learner.model.replay is not None
        assert learner.model.replay.take_agreement() == (0, 0)  # a step takes it for its metrics
        log_probs_of(learner, groups[0])
        alike, taken = learner.model.replay.take_agreement()
    assert alike == taken > 0
    assert all(np.array_equal(*pair) for pair in zip(found.log_probs, without.log_probs, strict=True))
    assert all(torch.equal(gradient, without.gradients[key]) for key, gradient in found.gradients.items())


def own_experts(causal_lm: Any) -> Callable[[int, Int32Array], ExpertArray]:
    """The experts that a plain model chooses."""
    replay, chosen = RouterReplay(causal_lm), dict[int, torch.Tensor]()

    def note(number: int, scores: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen[number] = own
        return scores.gather(1, own), own

    for layer in replay.routed:
        layer.chosen = partial(note, layer.number)  # type: ignore[method-assign]

    def experts_of(_: int, token_ids: Int32Array) -> ExpertArray:
        nothing = torch.full((token_ids.size, replay.num_layers, CHOSEN), -1)
        with torch.no_grad():
            causal_lm.get_decoder()(
                torch.from_numpy(token_ids.astype(np.int64))[None], use_cache=False, **{EXPERTS: nothing}
            )
        for number, own in chosen.items():
            nothing[:, number] = own
        return np.maximum(nothing.numpy(), 0).astype(np.uint8)

    return experts_of


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    trial.save_tiny(subject_of("qwen3_moe").architecture, tmp_path)
    groups, config = trial.trial_groups(VOCABULARY), trial.trial_config(tmp_path, router_replay=True)
    with trial.learner_of(config) as learner:
        with pytest.raises(LearnerError, match=r"expert numbers up to 3, but the learner's model has 2 layers of 4"):
            trial.learner_scores(learner, with_experts(groups, some_experts(3)))
        unrecorded = with_experts(groups, lambda _, ids: np.zeros((ids.size, 2, CHOSEN), np.uint8))
        with pytest.raises(LearnerError, match="recorded no experts for token 0 in layer 0, which has a router"):
            trial.learner_scores(learner, unrecorded)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {}, "is not a mixture of experts"),
        ("phimoe", {}, r"can't use .* its routers don't simply take the k best scores \(layers \[0, 1\]\)"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "can't use .*best groups get no weight"),
    ],
)
def test_a_model_whose_routers_can_not_be_told_is_refused_before_the_run(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    architecture = subject_of(name).architecture
    for key, value in changes.items():
        setattr(architecture, key, value)
    with pytest.raises(InputError, match=f"learner.router_replay: model_type '{name}' {message}"):
        check_replay(_small_model(architecture))
