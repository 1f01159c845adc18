"""Tensor parallelism over two CPU ranks: the sharded server takes a learner's weights and computes its log-probs."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from actors.learner import Learner
from actors.vllm_server import VllmServer
from rayapp.config.config import Config
from rayapp.core.types import RequestId, SamplingParams
from rayapp.engine.weights.buckets import WeightBucket
from support import make

References = Callable[[Iterable[WeightBucket]], list[Any]]
pytestmark = [
    pytest.mark.skipif(shutil.disk_usage("/dev/shm").free < 160 << 20, reason="vLLM's ranks need 160 MiB of /dev/shm"),
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

MAX_LOG_PROB_DIFFERENCE = 1e-4
"""In float32. A tensor that a sync left as it was moves them by far more, whichever it is."""


def config(model: Path) -> Config:
    return make.config(model, server={"tensor_parallel_size": 2, "dtype": "float32"})


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
    started = VllmServer(config(tiny_model), 0, must_sync=True)
    await started.start()
    yield started
    await started.close()


async def test_two_ranks_take_the_learners_weights_and_sample_with_its_log_probs(
    server: VllmServer, moved_model: Path, references: References
) -> None:
    learner = Learner(config(moved_model), 0, 1, "", 0)
    prompt, sampling = [72, 75, 84, 85], SamplingParams(max_tokens=24, seed=7)
    try:
        buckets = list(learner.export_weights(0, 100_000))
        facts = await server.load_weights(1, references(buckets))
        sampled = await server.generate(RequestId("group", 0, 0), prompt, sampling, min_policy_version=1)
        tokens = np.concatenate([prompt, sampled.token_ids])
        expected = learner.log_probs_of(make.group(make.trajectory(tokens, len(prompt), policy_version=1)))[0]
    finally:
        learner.close()

    assert facts["num_loaded"] == sum(len(bucket.entries) for bucket in buckets)
    assert sampled.policy_version == 1
    assert sampled.token_ids.size == expected.size
    assert np.abs(sampled.log_probs - expected).max() < MAX_LOG_PROB_DIFFERENCE
