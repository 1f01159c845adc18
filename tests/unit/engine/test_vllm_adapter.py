"""What the engine is told about adapters, and that it drops none; tests/cluster tests the engine itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.engine import vllm_arguments
from rayapp.engine.vllm_arguments import adapter_args, check_places, is_adapter

PACKED = {"model.layers.0.self_attn.qkv_proj": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"]}
MODULES = {"model.layers.0.self_attn.qkv_proj": None, "model.layers.0.mlp.down_proj": None}


def lora(rank: int, send: str = "adapter") -> Config:
    return Config.model_validate({"learner": {"lora": {"rank": rank, "send": send}}})


@pytest.mark.parametrize(("rank", "buffers"), [(1, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_vllm_gets_the_smallest_buffers_that_hold_the_rank(rank: int, buffers: int) -> None:
    assert adapter_args(lora(rank)) == {"enable_lora": True, "max_loras": 1, "max_lora_rank": buffers}


def test_adapters_in_folders_get_a_place_each_and_buffers_for_the_largest(tmp_path: Path) -> None:
    for name, rank in (("a", 4), ("b", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    folders = {name: str(tmp_path / name) for name in "ab"}
    on_gpu = vllm_arguments.is_on_gpu(lora(0))
    found, more = adapter_args(lora(0), folders), adapter_args(lora(100), folders)
    assert (found["max_loras"], found["max_lora_rank"]) == (2 if on_gpu else 3, 64)  # the last slot of a CPU is empty
    assert (more["max_loras"], more["max_lora_rank"]) == (3 if on_gpu else 4, 128)


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
