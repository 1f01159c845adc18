"""Families that the learner computes as transformers does, and the reasons against the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig

from rayapp.config.config import Config, with_values
from rayapp.config.learner import LoraSection
from rayapp.core.errors import InputError, LearnerError
from rayapp.engine.vllm_arguments import vllm_args
from rayapp.learner.attention import packed_attention, plan_attention
from rayapp.learner.family import check_family, head_rule, largest_difference, read_architecture
from rayapp.learner.packing import pack
from rayapp.learner.state.export import export_hf
from rayapp.storage.models.families import FAMILIES, TINY
from support import family_trial as trial
from support.family_check import VOCABULARY, checks_of, subject_of

SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2,
    "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 64}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon_h1": ({}, "call attention without the arguments that packing needs"),
    "llama4_text": (EXPERTS, "attend within chunks"),
    "bloom": ({}, "adds a bias by distance"),
    "gpt2": ({}, "no list of `layers`"),
    "gptj": ({}, "can't be trained"),
    "stablelm": ({}, "call attention without the arguments"),
    "mamba2": (MAMBA, "num_attention_heads"),
}  # fmt: skip


def saved(folder: Path, family: str, **changes: Any) -> Config:
    """A run's config over a folder that holds this family's config.json alone."""
    CONFIG_MAPPING[family](**(changes if changes == MAMBA else SMALL | changes)).save_pretrained(folder)
    rollout = {"max_prompt_tokens": 32, "max_completion_tokens": 32}
    return Config.model_validate(
        {"model": {"path": str(folder)}, "rollout": rollout, "learner": {"compute_dtype": "float32"}}
    )


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_computed_wrongly_is_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[family]
    config = saved(tmp_path, family, **changes)
    with pytest.raises(InputError, match=reason):
        check_family(read_architecture(config.model), config.model, config.learner, config.max_model_tokens)


def test_a_layer_that_reads_its_neighbours_tokens_is_found_by_computing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"layer_types": ["conv", "full_attention"]}
    config = saved(tmp_path, "lfm2", **changes)
    monkeypatch.setattr("rayapp.learner.family.give_borders", lambda causal_lm: False)
    with pytest.raises(InputError, match=r"log-probs of packed sequences differ by [\d.]+ from those of plain"):
        check_family(read_architecture(config.model), config.model, config.learner, config.max_model_tokens)


def test_a_model_that_transformers_can_not_load_without_its_image_tower_is_refused(tmp_path: Path) -> None:
    config = saved(tmp_path, "llama")
    text = SMALL | {"model_type": "ministral3"}
    architecture = CONFIG_MAPPING["mistral3"](text_config=text)
    refused = r"'mistral3' can't be trained: .* its language model alone \(model_type ministral3\)"
    with pytest.raises(InputError, match=refused):
        check_family(architecture, config.model, config.learner, config.max_model_tokens)


def test_a_cap_on_scores_in_a_nested_config_is_seen() -> None:
    text = SMALL | {"model_type": "gemma3_text", "final_logit_softcapping": 30.0}
    config = CONFIG_MAPPING["gemma3"](text_config=text)
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config)
    assert head_rule(causal_lm).softcap == 30.0


def test_dropout_in_a_nested_config_is_off_too(tmp_path: Path) -> None:
    config = saved(tmp_path, "gemma3")
    nested = CONFIG_MAPPING["gemma3"](text_config=SMALL | {"model_type": "gemma3_text", "attention_dropout": 0.5})
    nested.save_pretrained(tmp_path)
    assert read_architecture(config.model).text_config.attention_dropout == 0.0


def test_the_longest_sequence_of_the_config_is_that_of_learner_and_server(tmp_path: Path) -> None:
    config = with_values(saved(tmp_path, "gemma3"), model={"max_position_embeddings": 4321})
    CONFIG_MAPPING["gemma3"](text_config=SMALL | {"model_type": "gemma3_text"}).save_pretrained(tmp_path)

    served = vllm_args(config)["hf_overrides"](AutoConfig.from_pretrained(tmp_path))

    assert read_architecture(config.model).text_config.max_position_embeddings == 4321
    assert served.text_config.max_position_embeddings == 4321


@pytest.mark.parametrize("option", ["indices", "attention_mask"])
def test_an_attention_option_that_nobody_thought_of_is_an_error(option: str) -> None:
    packing = pack([[torch.arange(4, dtype=torch.int32).numpy()]], share_prefixes=True)
    plan = plan_attention(packing, torch.device("cpu"))
    query, key, value = torch.ones(3, 1, 2, 4, 8)
    options: dict[str, Any] = {"attention_mask": None, option: torch.ones(1)}
    with pytest.raises(LearnerError, match=f"Identity uses {option}, which packed attention"):
        packed_attention(torch.nn.Identity(), query, key, value, plan=plan, **options)


def test_values_narrower_than_queries_have_the_gradients_of_plain_attention() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 2, 9, 12, requires_grad=True).unbind()
    value = torch.randn(1, 2, 9, 5, requires_grad=True)
    plan = plan_attention(
        pack([[torch.arange(9, dtype=torch.int32).numpy()]], share_prefixes=True), torch.device("cpu")
    )
    packed, _ = packed_attention(torch.nn.Identity(), query, key, value, None, plan=plan)
    scores = (query @ key.transpose(-1, -2) * 12**-0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    plain = (scores.softmax(-1) @ value).transpose(1, 2)
    weights = torch.randn_like(plain)
    found, expected = (torch.autograd.grad((out * weights).sum(), (query, key, value)) for out in (packed, plain))
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=0)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own, theirs, atol=1e-5, rtol=0)


def test_making_the_small_model_leaves_the_random_numbers_of_the_run_alone() -> None:
    before = torch.random.get_rng_state()
    largest_difference(LlamaConfig(**SMALL), num_tokens=64)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("name", ["gemma3n_text", "apertus"])
def test_models_of_a_folder_hold_in_the_learner_with_adapters_and_in_final(name: str, tmp_path: Path) -> None:
    """Gemma 3n clips weights of layers past the layers; Apertus has bfloat16 parameters whatever it is told."""
    tiny = dict(FAMILIES[name].tiny) if name in FAMILIES else {}
    CONFIG_MAPPING[name](**(TINY | {"vocab_size": VOCABULARY, "dtype": torch.bfloat16} | tiny)).save_pretrained(
        tmp_path
    )
    found = list(checks_of(subject_of(str(tmp_path)), engine=False))
    assert [check.what for check in found] == ["learner", "adapters", "final/"]
    assert all(check.holds for check in found), found


def test_adapters_that_the_models_code_reads_past_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayapp.learner.state.lora.READ_PAST", set())
    config = with_values(saved(tmp_path, "gemma3n_text"), learner={"lora": LoraSection(rank=4)})
    with pytest.raises(
        InputError, match=r"with learner\.lora can't be trained: .* log-probs of packed sequences with adapters"
    ):
        check_family(read_architecture(config.model), config.model, config.learner, config.max_model_tokens)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_that_brings_its_own_code_is_trained_where_its_code_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    folder = tmp_path / "own"
    trial.save_tiny(LlamaConfig(**(SMALL | {"vocab_size": VOCABULARY})), folder)
    (folder / "own_code.py").write_text(CODE)
    values = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    values |= {"model_type": "own_llama", "architectures": ["OwnModel"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(values))
    config = trial.trial_config(folder)
    trusted = with_values(config, model={"trust_remote_code": True})
    with trial.learner_of(trusted) as learner:
        assert type(learner.model.causal_lm).__name__.endswith("OwnModel")
        groups = trial.trial_groups(VOCABULARY)
        found = trial.learner_scores(learner, groups)
        export_hf(trusted, learner.model, tmp_path / "final", learner.ranks)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    expected = trial.plain_scores(plain, groups)
    assert trial.log_prob_error(found, expected) < trial.MAX_LOG_PROB_ERROR
    assert trial.gradient_error(found, expected) < trial.MAX_GRADIENT_ERROR
    AutoModelForCausalLM.from_pretrained(tmp_path / "final", trust_remote_code=True)
