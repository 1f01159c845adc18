"""Which families of models the learner computes as transformers does, and what is said of the others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from rayapp.cli.doctor import fitness
from rayapp.config.config import Config
from rayapp.core.errors import InputError, LearnerError
from rayapp.learner.attention import packed_attention, plan_attention
from rayapp.learner.family import check_family, largest_difference, read_architecture
from rayapp.learner.packing import pack
from rayapp.learner.policy import build_causal_lm, check_head

SMALL = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2,
    "intermediate_size": 32, "vocab_size": 64,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "head_dim": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

ACCEPTED: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": EXPERTS, "mistral": {}, "ministral3": {},
    "gemma": {}, "gemma3_text": {}, "phi3": {"pad_token_id": 0, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "phimoe": EXPERTS | {"input_jitter_noise": 0.1, "router_jitter_noise": 0.1},
    "olmo": {}, "olmo2": {}, "olmo3": {}, "olmoe": EXPERTS, "smollm3": {"pad_token_id": 0}, "glm": {"pad_token_id": 0},
    "glm4": {"pad_token_id": 0}, "exaone4": {}, "ernie4_5": {}, "starcoder2": {"residual_dropout": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1}, "gpt2": {}, "granite": {}, "granitemoe": EXPERTS, "seed_oss": {},
    "glm4_moe": MLA | {"head_dim": 8, "num_key_value_heads": 2}, "deepseek_v2": MLA | {"topk_method": "greedy"},
    "deepseek_v3": MLA,
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": (EXPERTS, "other names for its weights than vLLM"),
    "gpt_oss": (EXPERTS, "GptOssAttention asks for s_aux: packed attention does not do that"),
    "gemma2": ({}, "Gemma2Attention asks for softcap: packed attention does not do that"),
    "qwen3_next": (EXPERTS, "layers of type linear_attention, .* would read their neighbours' tokens"),
    "qwen3_5_text": ({}, "layers of type linear_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    "llama4_text": (EXPERTS, "layers of type chunked_attention"),
    "falcon_h1": ({}, "can't be trained"),
    "jamba": ({}, "can't be trained"),
    "bloom": ({}, r"log-probs .* differ by [\d.]+ between the learner's packed sequences and plain ones"),
}


def saved(folder: Path, family: str, **changes: Any) -> Config:
    """A run's config over a folder that holds this family's config.json alone."""
    CONFIG_MAPPING[family](**(SMALL | changes)).save_pretrained(folder)
    rollout = {"max_prompt_tokens": 32, "max_completion_tokens": 32}
    return Config.model_validate(
        {"model": {"path": str(folder)}, "rollout": rollout, "learner": {"compute_dtype": "float32"}}
    )


@pytest.mark.parametrize("family", ACCEPTED)
def test_a_family_that_is_computed_rightly_is_accepted_with_its_dropout_off(family: str, tmp_path: Path) -> None:
    config = saved(tmp_path, family, attention_dropout=0.1, **ACCEPTED[family])
    check_family(read_architecture(config), config)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_computed_wrongly_is_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[family]
    config = saved(tmp_path, family, **changes)
    with pytest.raises(InputError, match=reason):
        check_family(read_architecture(config), config)


def test_a_window_shorter_than_the_longest_sequence_is_refused_with_the_number(tmp_path: Path) -> None:
    config = saved(tmp_path, "gemma3_text", sliding_window=62, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(InputError, match=r"sliding window of 62 tokens, and sequences may have 63: .* at most 63"):
        build_causal_lm(config)


def test_the_doctor_says_that_a_family_can_not_be_trained(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "config.json").unlink()
    config = saved(folder, "gpt_oss", architectures=["GptOssForCausalLM"], **EXPERTS)
    findings = {finding.what: finding.detail for finding in fitness(config) if finding.level == "problem"}
    assert "asks for s_aux" in findings["model"]


def test_a_cap_on_scores_in_a_nested_config_is_seen(tmp_path: Path) -> None:
    text = SMALL | {"model_type": "gemma3_text", "final_logit_softcapping": 30.0}
    config = CONFIG_MAPPING["gemma3"](text_config=text)
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError, match=r"final_logit_softcapping = 30\.0"):
        check_head(causal_lm)


def test_dropout_in_a_nested_config_is_off_too(tmp_path: Path) -> None:
    config = saved(tmp_path, "gemma3")
    nested = CONFIG_MAPPING["gemma3"](text_config=SMALL | {"model_type": "gemma3_text", "attention_dropout": 0.5})
    nested.save_pretrained(tmp_path)
    assert read_architecture(config).text_config.attention_dropout == 0.0


@pytest.mark.parametrize("option", ["s_aux", "softcap", "indices", "attention_mask"])
def test_an_attention_option_that_nobody_thought_of_is_an_error(option: str) -> None:
    packing = pack([[torch.arange(4, dtype=torch.int32).numpy()]], share_prefixes=True)
    plan = plan_attention(packing, torch.device("cpu"))
    query, key, value = torch.ones(3, 1, 2, 4, 8)
    options: dict[str, Any] = {"attention_mask": None, option: torch.ones(1)}
    with pytest.raises(LearnerError, match=f"Identity asks for {option}: packed attention"):
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
