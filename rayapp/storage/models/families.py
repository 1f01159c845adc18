"""Table of model families, by the `model_type` of the language model: facts that are needed before any weight is read.

The learner derives its computation from a model's own config (`learner/family.py`). `tests/support/family_check.py`
tests each entry.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# Features other than attention to all tokens and a plain output layer; `borders`: layers with a state along the
# sequence.
Need = Literal[
    "experts",
    "windows",
    "sinks",
    "attention cap",
    "logit cap",
    "logit scale",
    "latent attention",
    "borders",
    "longrope",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    needs: tuple[Need, ...] = ()
    parsers: tuple[str, ...] = ()  # of vLLM, for the family's calls, the likeliest first
    packages: tuple[str, ...] = ()  # that vLLM imports for the family on a CPU, besides its own dependencies
    refused: str = ""  # why the family can't be trained
    no_engine: str = ""  # why vLLM can't serve the family at all
    no_cpu_engine: str = ""  # why vLLM can't serve the family on a CPU; empty if untested
    tiny: Mapping[str, Any] = field(default_factory=dict)  # config values of the small test model, added to `TINY`


TINY = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
    "intermediate_size": 128, "max_position_embeddings": 256,
}  # fmt: skip
_SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "v_head_dim": 32, "head_dim": 64, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "first_k_dense_replace": 1,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
_CONV = {
    "layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_dim": 128, "block_ff_dim": 128,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, "short_factor": [1.0] * 16,
    "long_factor": [1.0 + i / 2 for i in range(16)],
}  # fmt: skip
_NARROW_CONV = "vLLM 0.30 on a CPU supports only short convolutions over 4 tokens, and these cover 3"
_COARSE_LATENT = (
    "the latent attention of vLLM 0.30 on a CPU has errors of 0.1 and more in log-probs, even before any weight sync"
)
_ALIBI = "its attention adds a bias by distance (ALiBi), which packed attention does not support"

FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(parsers=("hermes",)),
    "qwen3": Family(parsers=("hermes",)),
    "qwen3_moe": Family(needs=("experts",), parsers=("hermes", "qwen3_coder"), tiny=_EXPERTS),
    "qwen3_next": Family(
        needs=("experts", "borders"),
        parsers=("hermes", "qwen3_coder"),
        tiny=_EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 64},
    ),
    "qwen3_5_text": Family(
        needs=("borders",), parsers=("qwen3_coder", "hermes"), packages=("torchvision",), tiny=_LINEAR
    ),
    "qwen3_5_moe_text": Family(
        needs=("experts", "borders"),
        parsers=("qwen3_coder", "hermes"),
        packages=("torchvision",),
        tiny=_EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 64},
    ),
    "llama": Family(parsers=("llama3_json", "hermes", "pythonic")),
    "mistral": Family(needs=("windows",), parsers=("mistral", "hermes"), tiny={"sliding_window": 6}),
    "ministral3": Family(parsers=("mistral",)),
    "mixtral": Family(needs=("experts", "windows"), parsers=("mistral",), tiny=_EXPERTS | {"sliding_window": 6}),
    "gemma": Family(),
    "gemma2": Family(needs=("windows", "attention cap", "logit cap"), tiny=_SLIDING),
    "gemma3_text": Family(needs=("windows",), parsers=("pythonic",), tiny=_SLIDING),
    "gemma4_text": Family(
        needs=("windows",),
        parsers=("gemma4",),
        tiny=_SLIDING | {"global_head_dim": 64, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97},
    ),
    "phi3": Family(
        needs=("longrope",), parsers=("phi4_mini_json",), tiny={"pad_token_id": 0, "rope_parameters": _LONGROPE}
    ),
    "phimoe": Family(
        needs=("experts",),
        no_engine="vLLM adds a bias to its output layer, like Phi-3.5-MoE's, but the learner has none",
        tiny=_EXPERTS | {"moe_intermediate_size": 128, "attention_bias": True},
    ),
    "gpt_oss": Family(
        needs=("experts", "windows", "sinks"),
        parsers=("openai",),
        tiny=_EXPERTS | _SLIDING,
    ),
    "deepseek_v2": Family(
        needs=("experts", "latent attention"),
        parsers=("deepseek_v3",),
        no_cpu_engine=_COARSE_LATENT,
        tiny=_LATENT | {"topk_method": "greedy"},
    ),
    "deepseek_v3": Family(
        needs=("experts", "latent attention"),
        parsers=("deepseek_v31", "deepseek_v3", "kimi_k2"),
        no_cpu_engine=_COARSE_LATENT,
        tiny=_LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "glm": Family(tiny={"pad_token_id": 0}),
    "glm4": Family(tiny={"pad_token_id": 0}),
    "glm4_moe": Family(
        needs=("experts",),
        parsers=("glm45", "glm47"),
        tiny=_LATENT | {"head_dim": 32, "num_key_value_heads": 2},
    ),
    "glm4_moe_lite": Family(
        needs=("experts", "latent attention"),
        parsers=("glm47", "glm45"),
        no_cpu_engine=_COARSE_LATENT,
        tiny=_LATENT,
    ),
    "granite": Family(needs=("logit scale",), parsers=("granite", "granite4"), tiny={"logits_scaling": 4.0}),
    "granitemoe": Family(needs=("experts",), parsers=("granite",), tiny=_EXPERTS),
    "granitemoehybrid": Family(
        needs=("experts", "borders", "logit scale"),
        parsers=("granite4", "hermes"),
        tiny=_EXPERTS
        | _MAMBA
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64, "logits_scaling": 4.0},
    ),
    "lfm2": Family(needs=("borders",), parsers=("lfm2",), no_cpu_engine=_NARROW_CONV, tiny=_CONV),
    "lfm2_moe": Family(
        needs=("experts", "borders"),
        parsers=("lfm2",),
        no_cpu_engine=_NARROW_CONV,
        tiny=_EXPERTS | _CONV | {"num_dense_layers": 1},
    ),
    "falcon_h1": Family(
        refused="the model's layers call attention without the arguments that packing needs (transformers 5.10)"
    ),
    "bamba": Family(
        needs=("borders",),
        no_engine="vLLM 0.30 runs it with transformers' code, and can't serve the mamba layers of that code",
        tiny=_MAMBA | {"attn_layer_indices": [1]},
    ),
    "nemotron_h": Family(
        needs=("experts", "borders"),
        parsers=("qwen3_coder",),
        no_cpu_engine="its experts have no gate, which vLLM 0.30 computes on GPUs only",
        tiny=_LATENT
        | {
            "layers_block_type": ["mamba", "attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
        }
        | {"num_key_value_heads": 2, "head_dim": 32, "moe_shared_expert_intermediate_size": 64},
    ),
    "cohere": Family(needs=("logit scale",), parsers=("cohere_command3",), tiny={"logit_scale": 0.25}),
    "cohere2": Family(
        needs=("windows", "logit scale"), parsers=("cohere_command3",), tiny=_SLIDING | {"logit_scale": 0.25}
    ),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family(needs=("windows",), parsers=("olmo3",), tiny=_SLIDING),
    "olmoe": Family(needs=("experts",), tiny=_EXPERTS),
    "smollm3": Family(parsers=("hermes",), tiny={"pad_token_id": 0}),
    "exaone4": Family(needs=("windows",), parsers=("hermes",), tiny=_SLIDING),
    "ernie4_5": Family(parsers=("ernie45",)),
    "ernie4_5_moe": Family(
        needs=("experts",),
        parsers=("ernie45",),
        no_cpu_engine="the router of vLLM 0.30 on a CPU leaves out its correction bias, which causes errors of 0.1 and "
        "more in log-probs",
        tiny={"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64},
    ),
    "seed_oss": Family(parsers=("seed_oss",)),
    "starcoder2": Family(needs=("windows",), tiny={"sliding_window": 6}),
    "gpt_neox": Family(),
    "gpt2": Family(refused="its decoder has no list of `layers`, which the learner shards one by one"),
    "llama4_text": Family(
        refused="its layers attend within chunks of the sequence, which the learner does not support"
    ),
    "bloom": Family(refused=_ALIBI),
    "mpt": Family(refused=_ALIBI),
}


PICTURE_FAMILIES: Mapping[str, Family] = {
    "qwen2_5_vl": Family(parsers=("hermes",)),
    "qwen3_vl": Family(parsers=("hermes", "qwen3_coder")),
    "smolvlm": Family(),
}
"""Families that can be trained on pictures, by the `model_type` of the whole model."""


def family_of(architecture: Mapping[str, Any]) -> Family | None:
    """Return the family of a config.json; None if it is unknown."""
    return PICTURE_FAMILIES.get(str(architecture.get("model_type"))) or FAMILIES.get(text_type(architecture))


def refuse_pictures(architecture: Mapping[str, Any]) -> str:
    """Return the reason why a model can't be trained on pictures; empty if it can."""
    if (kind := architecture.get("model_type")) in PICTURE_FAMILIES:
        return ""
    known = ", ".join(PICTURE_FAMILIES)
    return (
        f"a {kind} can't be trained on pictures. Use a model of one of the families {known}, or rows without pictures."
    )


def text_type(architecture: Mapping[str, Any]) -> str:
    text = architecture.get("text_config") or architecture
    return str(text.get("model_type") or architecture.get("model_type"))


def unserved(kind: str, *, device: str, adapter: bool = False) -> str:
    """Return why vLLM can't serve a family on a device, with a LoRA `adapter`; empty if it can, or is untested."""
    family = FAMILIES.get(kind, Family())
    if family.no_engine:
        return f"{family.no_engine}."
    if family.no_cpu_engine and device == "cpu":
        return f"not on a CPU: {family.no_cpu_engine}. Run it on GPUs: cluster.device=gpu."
    if adapter and "experts" in family.needs and device == "cpu":
        return (
            "vLLM 0.30 on a CPU crashes at the first prompt if a model with experts has an adapter. Set "
            "learner.lora.send=merged."
        )
    missing = [name for name in family.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"vLLM imports {', '.join(missing)}, which is not installed. Install the release that fits this torch."
    return ""
