"""The real vLLM on CPU: it holds the learner's weights, and repeats itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from actors.vllm_server import VllmServer
from rayapp.config.config import Config
from rayapp.core.errors import EngineError, StaleVersionError, StalledError, WeightSyncError
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.engine.weights.buckets import WeightBucket, pack, unpack
from support import make
from support.learners import MAX_LOG_PROB_DIFFERENCE, exported, plain_log_probs

References = Callable[[Iterable[WeightBucket]], list[Any]]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

TOKENS = [72, 75, 84, 85, 86, 28, 2, 89]


def make_config(tiny_model: Path) -> Config:
    return make.config(tiny_model, recovery={"stall_replace_s": 30.0})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path) -> AsyncIterator[VllmServer]:
    started = VllmServer(make_config(tiny_model), 0)
    await started.start()
    yield started
    await started.close()


@pytest.fixture(scope="module")
def buckets(moved_model: Path) -> list[WeightBucket]:
    return exported(make_config(moved_model), TOKENS, bucket_bytes=100_000)[0]


async def generate_cohort(server: VllmServer, *, size: int, jitter: random.Random | None = None) -> list[Completion]:
    async def one(index: int) -> Completion:
        await asyncio.sleep(jitter.random() * 0.2 if jitter else 0)
        sampling = SamplingParams(max_tokens=24, seed=100 + index)
        return await server.generate(RequestId("group", 0, index), [72, 75, 84], sampling, cohort_size=size)

    return list(await asyncio.gather(*(one(index) for index in range(size))))


async def test_a_cohort_repeats_token_for_token_whatever_the_order_of_arrival(server: VllmServer) -> None:
    first = await generate_cohort(server, size=12)
    again = await generate_cohort(server, size=12, jitter=random.Random(3))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.log_probs, other.log_probs)


async def test_a_stop_text_ends_the_completion_and_its_tokens_are_kept(server: VllmServer) -> None:
    async def greedy(index: int, *stop: str) -> Completion:
        sampling = SamplingParams(max_tokens=24, temperature=0.0, stop=stop)
        return await server.generate(RequestId("group", 1, index), [72, 75, 84], sampling)

    whole = await greedy(0)
    assert whole.text == (await greedy(1, "never said")).text  # vLLM writes text only where it looks for a stop text
    stop = whole.text[5]
    cut = await greedy(2, stop)
    assert stop not in cut.text
    if cut.finish_reason == "stop":
        assert cut.token_ids.size == len(cut.text) + 1  # one token is one character here


async def test_a_server_with_older_weights_than_asked_for_refuses(server: VllmServer) -> None:
    with pytest.raises(StaleVersionError, match="version 0, but request group=2/trajectory=0 needs version 1"):
        await server.generate(RequestId("group", 2, 0), [72], SamplingParams(max_tokens=2), min_policy_version=1)


async def test_after_an_update_the_server_computes_the_log_probs_of_the_learners_weights(
    server: VllmServer, buckets: list[WeightBucket], moved_model: Path, tiny_model: Path, references: References
) -> None:
    assert len(buckets) > 1
    facts = await server.load_weights(1, references(buckets))
    assert facts["bytes"] == sum(bucket.data.nbytes for bucket in buckets)
    found = (await server.prompt_log_probs([TOKENS]))[0]
    expected = plain_log_probs(moved_model, TOKENS)
    assert np.abs(found - expected).max() < MAX_LOG_PROB_DIFFERENCE
    # ... which are not those it started with
    assert np.abs(found - plain_log_probs(tiny_model, TOKENS)).max() > 4 * MAX_LOG_PROB_DIFFERENCE
    assert (await generate_cohort(server, size=2))[0].policy_version == 1


async def test_a_sync_through_the_store_is_one_message_to_the_workers_however_many_buckets_it_has(
    server: VllmServer, buckets: list[WeightBucket], references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = server._started_engine()._engine.engine_core
    called: list[str] = []
    call = core.call_utility_async

    async def counted(method: str, *args: Any) -> Any:
        called.append(method)
        return await call(method, *args)

    monkeypatch.setattr(core, "call_utility_async", counted)
    tensors = [item for bucket in buckets for item in unpack(bucket.entries, torch.from_numpy(bucket.data))]
    version, found = server._started_engine().policy_version, []
    for number, sent in enumerate((buckets, list(pack(tensors, 1 << 30))), start=1):
        called.clear()
        await server.load_weights(version + number, references(sent))
        found.append([len(sent), *called])
    assert [found[0][0] > 3, found[1][0]] == [True, 1]
    # One message brings the workers a file that they map. The first pauses the engine, and it stays paused.
    assert [found[0][1:], found[1][1:]] == [["pause_scheduler", "collective_rpc"], ["collective_rpc"]]


async def test_a_request_whose_cohort_does_not_come_stalls_and_then_starts_alone(server: VllmServer) -> None:
    # It waits half of stall_replace_s, 15 s, for its company.
    engine, sampling = server._started_engine(), SamplingParams(max_tokens=4, seed=1)
    lonely = asyncio.ensure_future(server.generate(RequestId("group", 9, 0), [72, 75], sampling, cohort_size=2))

    with pytest.raises(StalledError, match="vllm-server-0 answers, but none of the 1 requests in progress"):
        while not lonely.done():
            engine.in_hand.check_moves(1.0, who="vllm-server-0", work="requests")
            await asyncio.sleep(0.1)

    assert (await lonely).token_ids.size > 0
    engine.in_hand.check_moves(0.0, who="vllm-server-0", work="requests")
    assert await server.ping()


async def test_a_server_whose_update_failed_does_not_generate(server: VllmServer, references: References) -> None:
    torn = WeightBucket(
        entries=(("no.such.weight", "bfloat16", (4,), 0, 8),), data=np.zeros(64, np.uint8), checksums={}
    )
    with pytest.raises(WeightSyncError, match="weight update failed in the phase 'receive'"):
        await server.load_weights(2, references([torn]))
    with pytest.raises(WeightSyncError, match="mixture"):
        await server.generate(RequestId("group", 3, 0), [72], SamplingParams(max_tokens=2))


async def test_an_engine_without_room_for_its_cache_does_not_start_and_leaves_no_process(tiny_model: Path) -> None:
    config = make_config(tiny_model)
    larger = config.model_copy(update={"server": config.server.model_copy(update={"kv_cache_gib": 100_000})})
    before = engines()

    with pytest.raises(EngineError, match=f"vLLM did not start with {tiny_model}: "):
        await VllmServer(larger, 0).start()

    assert psutil.wait_procs(engines() - before, timeout=60.0)[1] == []


def engines() -> set[psutil.Process]:
    """Engine processes of this one."""
    return {child for child in psutil.Process().children(recursive=True) if "VLLM" in child.name()}


async def test_an_engine_ends_with_its_server(server: VllmServer) -> None:
    running = engines()
    assert running

    await server.close()

    assert psutil.wait_procs(running, timeout=60.0)[1] == []
