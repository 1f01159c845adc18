"""The real vLLM on CPU with a KV cache that is too small, and with weights that arrive while it samples."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from safetensors.torch import load_file

from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.weights.buckets import WeightBucket
from support import family_trial as trial
from support import make
from support.learners import MAX_LOG_PROB_DIFFERENCE, plain_log_probs, save_moved

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

BLOCK_TOKENS, NUM_BLOCKS = 32, 20
PROMPT = [72, 75, 84, 85, 41, 42, 43, 44]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[VllmEngine]:
    lengths = {"max_prompt_tokens": 56, "max_completion_tokens": 200}
    config = make.config(tiny_model, rollout=lengths, server={"engine_args": {"block_size": BLOCK_TOKENS}})
    started = await VllmEngine.start(config, num_gpu_blocks_override=NUM_BLOCKS)
    yield started
    started.close()


async def sample(engine: VllmEngine, group: int, count: int, max_tokens: int = 200) -> list[Completion]:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return list(
        await asyncio.gather(*(engine.generate(RequestId("group", group, i), PROMPT, sampling) for i in range(count)))
    )


async def test_every_request_is_served_by_a_cache_that_is_too_small(engine: VllmEngine) -> None:
    # 24 completions of up to 4 blocks want far more than 20 blocks.
    completions = await sample(engine, 0, 24, max_tokens=110)

    load = engine.load()
    assert load["preempted"] > 0
    assert load["gate_waiting"] == 0
    assert all(c.finish_reason == "stop" or c.token_ids.size == 110 for c in completions)
    assert all(c.log_probs.size == c.token_ids.size for c in completions)


@dataclass(frozen=True)
class Sent:
    """A model, and its weights as a learner sends them."""

    folder: Path
    bucket: WeightBucket


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Sent, Sent]:
    """The engine's own model, and one far from it."""
    folders = (tiny_model, save_moved(tiny_model, tmp_path_factory.mktemp("moved"), noise=0.3))
    own, moved = (
        Sent(folder, trial.bucket_of(list(load_file(folder / "model.safetensors").items()))) for folder in folders
    )
    return own, moved


def differences(model: Sent, completion: Completion) -> np.ndarray:
    """Return how far the log-probs (T,) of a completion behind PROMPT are from those of a model."""
    expected = plain_log_probs(model.folder, [*PROMPT, *completion.token_ids.tolist()])[len(PROMPT) - 1 :]
    return np.abs(completion.log_probs - expected)


async def spanning_an_update(
    engine: VllmEngine, models: tuple[Sent, Sent], *, loses_keys: bool = False
) -> tuple[int, list[Completion]]:
    """Return the version before, and those of three completions during which the moved weights, five versions later,
    came. With `loses_keys` they lost their keys and values before, as in a sleep on a GPU."""
    for _ in range(10):
        before = engine.policy_version
        running = asyncio.create_task(sample(engine, 1, 3))
        async with asyncio.timeout(60):
            while engine.load()["running"] < 1 and not running.done():
                await asyncio.sleep(0)
        if loses_keys:
            assert not await engine.sleep(keeps_requests=True)  # a CPU's memory is not freed
            # vLLM's sleep on a GPU does this to the requests that it keeps: preempts them, and empties the caches.
            await engine._engine.pause_generation(mode="keep", clear_cache=True)
        await trial.load_weights(engine, before + 5, models[1].bucket)
        if spanning := [c for c in await running if c.version_spans]:
            return before, spanning
        # The engine was done before this process, which others keep from the processor, could ask.
        await trial.load_weights(engine, before + 6, models[0].bucket)
    raise AssertionError("no update came while the engine sampled")


async def test_weights_that_arrive_in_the_middle_go_on_from_the_same_tokens_and_are_told_apart(
    engine: VllmEngine, models: tuple[Sent, Sent]
) -> None:
    before, spanning = await spanning_an_update(engine, models)

    for completion in spanning:
        first, last = completion.version_spans
        assert (first.policy_version, last.policy_version) == (before, before + 5)
        assert completion.policy_version == before
        assert first.num_tokens + last.num_tokens == completion.token_ids.size
        # The tokens before are the old weights' to the last bits; those behind are not.
        difference = differences(models[0], completion)
        assert difference[: first.num_tokens].max() < MAX_LOG_PROB_DIFFERENCE
        assert difference[first.num_tokens :].max() > 10 * MAX_LOG_PROB_DIFFERENCE
    (later,) = await sample(engine, 2, 1)
    assert (later.version_spans, later.policy_version) == ((), engine.policy_version)


@pytest.mark.long
async def test_requests_that_lost_their_keys_and_values_as_in_a_sleep_go_on_as_the_new_weights_compute_them(
    engine: VllmEngine, models: tuple[Sent, Sent]
) -> None:
    await trial.load_weights(engine, engine.policy_version + 1, models[0].bucket)
    _, spanning = await spanning_an_update(engine, models, loses_keys=True)

    for completion in spanning:
        first = completion.version_spans[0].num_tokens
        assert first + completion.version_spans[1].num_tokens == completion.token_ids.size
        difference = differences(models[1], completion)
        assert np.median(difference[:first]) > 10 * MAX_LOG_PROB_DIFFERENCE
        # The whole context is computed again, so that not a key of the old weights is left. The moved weights are
        # large: in bfloat16 their own log-probs differ from those in float32 by 0.035 in the median, by 0.7 at most.
        assert np.median(difference[first:]) < 3 * MAX_LOG_PROB_DIFFERENCE


async def test_an_engine_whose_process_ends_just_as_it_is_killed_is_closed_whole(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last test: it ends the engine.
    resources = engine._engine.engine_core.resources
    [process] = resources.engine_manager.processes
    os.kill(process.pid, signal.SIGSTOP)  # so that asking it to leave takes vLLM's five seconds, and it is to be killed
    children = psutil.Process.children

    def children_too_late(parent: psutil.Process, **options: Any) -> list[psutil.Process]:
        os.kill(parent.pid, signal.SIGKILL)
        process.join()
        return children(parent, **options)

    monkeypatch.setattr(psutil.Process, "children", children_too_late)

    engine.close()
    engine.close()

    assert not process.is_alive()
    assert resources.output_socket.closed
    assert resources.input_socket.closed
