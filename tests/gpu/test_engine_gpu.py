"""A vLLM engine on one CUDA device: its log-probs beside the learner's, and sleep, also in the middle of a completion.

make test ARGS=tests/gpu
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayapp.config.config import Config
from rayapp.core.types import RequestId, SamplingParams
from support import make
from support.learners import learner_alone, save_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine"),
]

PROMPT = list(range(2, 34))
SAMPLING = SamplingParams(max_tokens=192, temperature=1.0, seed=0)


def config_of(folder: Path, **server: object) -> Config:
    shape = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    model = save_llama(folder, dtype="bfloat16", num_attention_heads=16, num_key_value_heads=8, **shape)
    own = {"gpu_memory_utilization": 0.5, "kv_cache_gib": 1, "weight_transport": "object_store"}
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "cluster": {"device": "gpu", "placement": "colocated"},
            "algorithm": {"rollout_correction": {"level": "token"}},
            "rollout": {"max_prompt_tokens": 64, "max_completion_tokens": 192},
            "server": own | server,
            "learner": {"max_tokens_per_microbatch": 8192},
        }
    )


@pytest.mark.parametrize(
    ("server", "most"),
    [({}, 0.05), ({"enforce_eager": True}, 0.05), ({"quantization": "fp8_per_block", "kv_cache_dtype": "fp8"}, 0.3)],
    ids=["compiled", "eager", "fp8"],
)
def test_an_engine_scores_as_the_learner_and_sleeps(tmp_path: Path, server: dict[str, object], most: float) -> None:
    config = config_of(tmp_path, **server)
    spawn = multiprocessing.get_context("spawn")  # engine and learner each need a process group of their own
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as process:
        found = process.submit(_use_engine, config).result()
        learners = process.submit(_learner_log_probs, config, found["tokens"]).result()

    assert float(np.abs(learners - found["log_probs"]).mean()) <= most
    assert found["freed"] > 0
    assert found["facts"]["async_scheduling"]
    bytes_per_token = 2 * 8 * 8 * 64 * (1 if "kv_cache_dtype" in server else 2)  # keys and values, layers, heads, width
    assert found["facts"]["kv_blocks"] * found["facts"]["block_tokens"] == pytest.approx(
        2**30 / bytes_per_token, rel=0.02
    )
    assert found["sampled_after_sleep"] > 0


def _use_engine(config: Config) -> dict[str, Any]:
    return asyncio.run(_sample_and_sleep(config))


async def _sample_and_sleep(config: Config) -> dict[str, Any]:
    from rayapp.engine.vllm import VllmEngine

    engine = await VllmEngine.start(config)
    told, has_begun = list[int](), asyncio.Event()

    def tell(tokens: Sequence[int]) -> None:
        told.extend(tokens)
        has_begun.set()

    try:
        first = await engine.generate(RequestId("group", 0), PROMPT, SAMPLING)
        tokens = [*PROMPT, *first.token_ids]
        before = torch.cuda.mem_get_info(0)[0]
        assert await engine.sleep()
        freed = torch.cuda.mem_get_info(0)[0] - before
        await engine.wake()
        running = asyncio.create_task(engine.generate(RequestId("group", 1), PROMPT, SAMPLING, tell))
        async with asyncio.timeout(120.0):
            await has_begun.wait()
            await engine.sleep(keeps_requests=True)
            num_before = len(told)
            await engine.wake()
            num_after = len((await running).token_ids) - num_before
        log_probs = await engine.prompt_log_probs(tokens)
        facts = await engine.facts()
    finally:
        engine.close()
    found = {"tokens": np.array(tokens), "log_probs": log_probs, "freed": freed, "sampled_after_sleep": num_after}
    return found | {"facts": facts}


def _learner_log_probs(config: Config, tokens: np.ndarray) -> np.ndarray:
    """Log-probs (T-1,) of each token given the earlier ones, by the learner's own code."""
    from rayapp.learner.batch import TrainItem, make_micro_batch
    from rayapp.learner.log_probs import HeadOptions
    from rayapp.learner.policy import to_device

    with learner_alone(config) as (learner, ranks):
        trajectory = make.trajectory(tokens)
        item = TrainItem(row=0, group=0, trajectory=trajectory, advantages=np.ones(tokens.size - 1, np.float32))
        batch = to_device(make_micro_batch([item], share_prefixes=False), ranks.device)
        with torch.no_grad():
            scores = learner.model(batch, HeadOptions(temperature=1.0, chunk_rows=1024))
        found: np.ndarray = scores.log_probs[0].float().cpu().numpy()
        return found
