"""The real vLLM on a CPU with weights and a KV cache in 8 bits, while the sender's weights stay in bfloat16."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from safetensors.torch import load_file

from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.engine.vllm import VllmEngine
from support import family_trial as trial
from support import make
from support.learners import plain_log_probs, save_moved

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        "avx512f" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's CPU cache of 8 bits needs AVX-512"
    ),
]

PROMPT = [72, 75, 84, 85, 41, 42, 43, 44]
FP8_ERROR = 0.15
"""Mean error of log-probs under the weights that were sent; under other weights three times that."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[VllmEngine]:
    config = make.config(
        tiny_model,
        algorithm={"rollout_correction": {"level": "token"}},
        rollout={"max_prompt_tokens": 56, "max_completion_tokens": 200},
        server={"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8", "dtype": "bfloat16"},
    )
    started = await VllmEngine.start(config)
    yield started
    started.close()


@pytest.fixture(scope="module")
def moved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model far from the engine's first one."""
    return save_moved(tiny_model, tmp_path_factory.mktemp("moved"), noise=0.05)


async def errors(engine: VllmEngine, group: int, *models: Path) -> list[float]:
    """Sample eight completions; return the mean error of their log-probs under each model."""
    sampling = SamplingParams(max_tokens=60, seed=1)
    completions = await asyncio.gather(
        *(engine.generate(RequestId("group", group, i), PROMPT, sampling) for i in range(8))
    )

    def error(completion: Completion, model: Path) -> np.ndarray:
        expected = plain_log_probs(model, [*PROMPT, *completion.token_ids.tolist()])[len(PROMPT) - 1 :]
        return np.abs(completion.log_probs - expected)

    return [float(np.concatenate([error(each, model) for each in completions]).mean()) for model in models]


async def test_new_weights_are_rounded_as_they_are_loaded(engine: VllmEngine, tiny_model: Path, moved: Path) -> None:
    own, other = await errors(engine, 0, tiny_model, moved)
    assert own < FP8_ERROR < 3 * FP8_ERROR < other

    bucket = trial.bucket_of(list(load_file(moved / "model.safetensors").items()))
    num_loaded = await trial.load_weights(engine, 1, bucket)

    other, own = await errors(engine, 1, tiny_model, moved)
    assert own < FP8_ERROR < 3 * FP8_ERROR < other
    assert num_loaded == len(bucket.entries)
