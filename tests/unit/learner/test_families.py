"""Every family of models in the table, tiny: the learner computes what transformers computes on padded rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rayapp.learner.families import trial
from rayapp.learner.families.check import VOCABULARY, plain_model, subject_of
from rayapp.learner.families.mixers import mixers_of
from rayapp.learner.state.export import sent_weights, weight_shapes
from rayapp.storage.models.families import FAMILIES

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
