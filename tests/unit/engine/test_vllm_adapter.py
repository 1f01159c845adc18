"""What the engine is told about adapters, and that it drops none; tests/cluster tests the engine itself."""

from __future__ import annotations

import pytest

from rayapp.config.config import Config
from rayapp.config.learner import LoraSection
from rayapp.engine.vllm_arguments import adapter_args, check_places, is_adapter

PACKED = {"model.layers.0.self_attn.qkv_proj": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]}
MODULES = {"model.layers.0.self_attn.qkv_proj": None, "model.layers.0.mlp.down_proj": None}


def lora(rank: int, send: str = "adapter") -> LoraSection:
    return Config.model_validate({"learner": {"lora": {"rank": rank, "send": send}}}).learner.lora


@pytest.mark.parametrize(("rank", "buffers"), [(1, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_vllm_gets_the_smallest_buffers_that_hold_the_rank(rank: int, buffers: int) -> None:
    assert adapter_args(lora(rank)) == {"enable_lora": True, "max_loras": 1, "max_lora_rank": buffers}


def test_the_ranks_are_those_that_vllm_takes() -> None:
    from typing import get_args

    from rayapp.engine.vllm_arguments import RANKS

    config = pytest.importorskip("vllm.config.lora")
    assert set(RANKS) < set(get_args(config.MaxLoRARanks))


def test_merged_weights_need_nothing_of_vllm_and_a_rank_it_lacks_is_refused() -> None:
    assert adapter_args(lora(0)) == adapter_args(lora(16, "merged")) == adapter_args(lora(1000, "merged")) == {}
    with pytest.raises(ValueError, match=r"rank is 513, but vLLM serves adapters of rank 512 at most.*send: merged"):
        lora(513)


def test_an_adapter_is_known_by_its_names() -> None:
    names = [f"base_model.model.model.layers.0.mlp.down_proj.lora_{letter}.weight" for letter in "AB"]
    adapter = [(name, "bfloat16", (8, 8), 0, 128) for name in names]
    assert is_adapter(adapter)
    assert not is_adapter([*adapter, ("model.norm.weight", "bfloat16", (8,), 0, 16)])
    assert not is_adapter([])


def test_modules_that_the_engine_lacks_are_told() -> None:
    present = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"]
    check_places(dict.fromkeys(present), MODULES, PACKED)
    with pytest.raises(
        ValueError, match=r"lacks 1 of the \d+ modules that the adapter changes: model\.layers\.9\.mlp\.down_proj"
    ):
        check_places(dict.fromkeys([*present, "model.layers.9.mlp.down_proj"]), MODULES, PACKED)
