"""The real vLLM on CPU computes the learner's log-probs after a sync, in every pair of number formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.vllm_server import VllmServer
from rayapp.config.config import Config
from rayapp.engine.weights.buckets import WeightBucket
from support import make
from support.learners import exported

References = Callable[[Iterable[WeightBucket]], list[Any]]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = [72, 75, 84, 85, 86, 28, 2, 89]
EXACT, ROUNDED = 2e-5, 0.05
"""Bounds of a log-prob's error. Weights that are rounded to bfloat16 on their way, and computed with in float32, differ
by 100 times the first bound; logits of size 4 in bfloat16 by up to 1/64 between two orders of summation."""


def config_of(model: Path, learner: str, server: str) -> Config:
    return make.config(model, learner={"compute_dtype": learner}, server={"dtype": server})


@pytest.mark.parametrize("server_dtype", ["float32", "bfloat16"])
async def test_the_engine_holds_the_weights_of_the_learner_in_every_pair_of_formats(
    tiny_model: Path, moved_model: Path, references: References, server_dtype: str
) -> None:
    last = Config().train.num_steps
    server = VllmServer(config_of(tiny_model, "float32", server_dtype), 0)
    found: dict[tuple[str, int], float] = {}
    try:
        await server.start()
        for learner_dtype in ("float32", "bfloat16"):
            for version in (1, last):
                config = config_of(moved_model, learner_dtype, server_dtype)
                buckets, expected = exported(config, TOKENS, version=version)
                await server.load_weights(version, references(buckets))
                computed = (await server.prompt_log_probs([TOKENS]))[0][3:]
                found[learner_dtype, version] = float(np.abs(computed - expected).max())
    finally:
        await server.close()

    bound = EXACT if server_dtype == "float32" else ROUNDED
    assert found["float32", 1] < bound
    assert found["bfloat16", 1] < ROUNDED
    if server_dtype == "float32":  # after the last step servers hold the rounded weights of final/
        assert EXACT < found["float32", last] < ROUNDED
