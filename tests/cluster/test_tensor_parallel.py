"""Tensor parallelism over two CPU ranks: the sharded server takes a learner's weights and computes its log-probs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.torch import load_file

from actors.learner import Learner
from actors.vllm_server import VllmServer
from rayapp.config.config import Config
from rayapp.core.errors import WeightSyncError
from rayapp.core.types import Group, RequestId, SamplingParams
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.weights.buckets import WeightBucket, checksum_of, part_of
from support import make

References = Callable[[Iterable[WeightBucket]], list[Any]]
pytestmark = [
    pytest.mark.skipif(shutil.disk_usage("/dev/shm").free < 160 << 20, reason="vLLM's ranks need 160 MiB of /dev/shm"),
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

MAX_LOG_PROB_DIFFERENCE = 0.05
"""bfloat16 has 8 bits of mantissa: logits of size 4 differ by up to 1/64 between two orders of summation."""


def config(model: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "cluster": {"device": "cpu"},
            "rollout": {"max_prompt_tokens": 64, "max_completion_tokens": 32},
            "learner": {"max_tokens_per_microbatch": 256},
            "server": {"kv_cache_gib": 0.1, "tensor_parallel_size": 2},
        }
    )


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[None]:
    """Each rank on a core of its own, where there are two."""
    before = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    cores = sorted(os.sched_getaffinity(0))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[1 % len(cores)]}"
    yield
    if before is None:
        del os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path, two_ranks: None) -> AsyncIterator[VllmServer]:
    start_engine = partial(VllmEngine.start, worker_extension_cls="support.read_back.ReadBackExtension")
    started = VllmServer(config(tiny_model), 0, must_sync=True, start_engine=start_engine)
    await started.start()
    yield started
    await started.close()


def as_group(prompt: list[int], completion: np.ndarray) -> Group:
    """One trajectory, as the learner takes it."""
    return make.group(make.trajectory(np.concatenate([prompt, completion]), len(prompt), policy_version=1))


async def test_two_ranks_take_the_learners_weights_and_sample_with_its_log_probs(
    server: VllmServer, tiny_model: Path, moved_model: Path, references: References
) -> None:
    learner = Learner(config(moved_model), 0, 1, "", 0)
    prompt, found = [72, 75, 84, 85], set()
    try:
        buckets = list(learner.export_weights(0, 100_000))
        facts = await server.load_weights(1, references(buckets))
        sampled = await server.generate(
            RequestId("group", 0, 0), prompt, SamplingParams(max_tokens=24, seed=7), min_policy_version=1
        )
        expected = learner.log_probs_of(as_group(prompt, sampled.token_ids))[0]
    finally:
        learner.close()

    assert sampled.policy_version == 1
    assert sampled.token_ids.size == expected.size
    assert np.abs(sampled.log_probs - expected).max() < MAX_LOG_PROB_DIFFERENCE
    # Every sampled tensor is seen, over the ranks; one that a sync left as it was is found, whichever it is.
    checksums = {name: value for bucket in buckets for name, value in bucket.checksums}
    assert facts["num_loaded"] == len(checksums)
    engine = server._started_engine()
    for name, tensor in load_file(tiny_model / "model.safetensors").items():
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if (old := checksum_of(part_of(name, tensor.bfloat16()))) != checksums.get(name, old) and kind not in found:
            with pytest.raises(WeightSyncError, match=f"held by this server have other checksums: {re.escape(name)}"):
                await engine._transfer("check", engine._engine.collective_rpc("check_held", args=({name: old},)))
            found.add(kind)
    assert found > {"embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
