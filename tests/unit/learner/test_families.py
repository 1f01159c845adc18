"""Every family of models in the table, tiny: the learner computes what transformers computes on padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from rayapp.learner.families import trial
from rayapp.learner.families.check import VOCABULARY, plain_model, subject_of
from rayapp.learner.families.mixers import mixers_of
from rayapp.learner.state.export import export_hf, sent_weights, weight_shapes
from rayapp.storage.models.families import FAMILIES, TINY

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
        sent = dict(sent_weights(learner.model, config.learner.lora))
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
"""Those of which transformers loads the language model alone."""


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
