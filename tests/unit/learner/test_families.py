"""Every family of models in the table, tiny: the learner computes what transformers computes on padded rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rayapp.learner.families import trial
from rayapp.learner.families.rope import pin_positions
from rayapp.storage.models.families import FAMILIES, TINY

pytestmark = pytest.mark.slow

VOCABULARY = 61
TRAINED = sorted(name for name, family in FAMILIES.items() if not family.refused)
MAX_GRADIENT_ERROR = {"gemma4_text": 1e-5}
"""Its scores are not scaled by the root of the width: they are eight times as large, and float32 as much coarser."""


def save(name: str, folder: Path) -> Path:
    architecture = CONFIG_MAPPING[name](**(TINY | {"vocab_size": VOCABULARY} | dict(FAMILIES[name].tiny)))
    trial.save_tiny(architecture, folder)
    return folder


def plain(folder: Path) -> trial.Scores:
    causal_lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    pin_positions(causal_lm, trial.trial_config(folder).max_model_tokens)
    return trial.plain_scores(causal_lm, trial.trial_groups(VOCABULARY))


@pytest.mark.parametrize("name", TRAINED)
def test_log_probs_and_gradients_of_a_family_are_those_of_plain_attention(name: str, tmp_path: Path) -> None:
    folder, limit = save(name, tmp_path), MAX_GRADIENT_ERROR.get(name, trial.MAX_GRADIENT_ERROR)
    groups, expected = trial.trial_groups(VOCABULARY), plain(folder)
    with trial.learner_of(trial.trial_config(folder)) as learner:
        found = trial.learner_scores(learner, groups)
    assert trial.log_prob_error(found, expected) < trial.MAX_LOG_PROB_ERROR
    assert trial.gradient_error(found, expected) < limit
    changes = {"share_prefixes": False, "activation_checkpointing": True, "lora": {"rank": 4}}
    with trial.learner_of(trial.trial_config(folder, **changes)) as learner:
        found = trial.learner_scores(learner, groups)
        adapters = trial.adapter_gradients(learner, expected)
    assert trial.log_prob_error(found, expected) < trial.MAX_LOG_PROB_ERROR
    assert trial.gradient_error(found, adapters) < limit
