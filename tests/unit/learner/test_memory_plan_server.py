"""The plan of a server's KV cache against vLLM's own count of blocks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.engine.vllm_arguments import vllm_args
from rayapp.learner.memory.plan import plan_server
from rayapp.learner.memory.shape import GIB, model_shape

pytestmark = pytest.mark.slow
ARCHITECTURES = Path(__file__).parents[2] / "data" / "architectures"


@pytest.mark.parametrize(("name", "num_ranks"), [("qwen2.5-0.5b", 1), ("qwen3-30b-a3b", 8)])
def test_the_tokens_of_the_kv_cache_are_those_that_vllm_counts(tmp_path: Path, name: str, num_ranks: int) -> None:
    """vLLM rounds down to whole blocks. With more ranks than key heads every rank holds one head."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shutil.copy(ARCHITECTURES / f"{name}.json", tmp_path / "config.json")
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "cluster": {"device": "cpu"},
            "server": {"gpu_memory_utilization": 0.9, "tensor_parallel_size": num_ranks},
        }
    )
    plan = plan_server(model_shape(config), config.server, config.max_model_tokens, 80 * GIB)
    theirs = AsyncEngineArgs(**vllm_args(config) | {"skip_tokenizer_init": True}).create_engine_config()
    model, block = theirs.model_config, theirs.cache_config.block_size
    spec = FullAttentionSpec(
        block_size=block,
        num_kv_heads=model.get_num_kv_heads(theirs.parallel_config),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(theirs.cache_config.cache_dtype, model),
    )
    resolve_kv_cache_layout(theirs, [["LBNHC"]] * num_ranks, [spec])
    layers = {f"model.layers.{index}.self_attn.attn": spec for index in range(model.get_total_num_hidden_layers())}

    found = get_kv_cache_configs(theirs, [layers] * num_ranks, [plan.kv_cache] * num_ranks)

    assert len(found) == num_ranks
    for each in found:
        assert 0 <= plan.kv_tokens - each.num_blocks * block < block
