"""A server's promises about its weights, with an engine that samples without a model. No Ray is started."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from actors.vllm_server import VllmServer
from rayapp.config.config import Config
from rayapp.core.errors import EngineDeadError, StaleVersionError, StalledError, WeightSyncError
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.engine.weights.buckets import WeightBucket
from support.stand_ins import VERSION_TENSOR, ScriptedServer


async def weights(version: int) -> WeightBucket:
    """Return a reference to the bucket of a learner with this version."""
    return WeightBucket(
        entries=((VERSION_TENSOR, "uint8", (64,), 0, 64),), data=np.full(64, version, np.uint8), checksums={}
    )


async def started(*, must_sync: bool = False) -> ScriptedServer:
    server = ScriptedServer(Config.model_validate({"recovery": {"stall_replace_s": 1e-9}}), 0, must_sync, 0.0)
    await server.start()
    return server


async def ask(server: ScriptedServer, *, min_policy_version: int = 0) -> Completion:
    return await server.generate(
        RequestId("group", 0, 0), [72], SamplingParams(max_tokens=4, seed=1), min_policy_version
    )


async def test_a_server_that_was_started_again_samples_nothing_until_it_has_weights() -> None:
    server = await started(must_sync=True)

    with pytest.raises(WeightSyncError, match="vllm-server-0 has no weights of the learners yet"):
        await ask(server)

    assert (await server.load_weights(3, [weights(3)]))["bytes"] == 64
    assert (await ask(server)).policy_version == 3
    with pytest.raises(StaleVersionError, match="version 3, but request group=0/trajectory=0 needs version 4"):
        await ask(server, min_policy_version=4)
    await server.close()
    with pytest.raises(EngineDeadError, match="is being started"):
        await server.ping()


async def test_a_request_that_meets_a_weight_update_is_sampled_with_the_new_weights() -> None:
    server, sent = await started(), asyncio.Event()

    async def late() -> WeightBucket:
        await sent.wait()
        return await weights(1)

    update = asyncio.create_task(server.load_weights(1, [late()]))
    await asyncio.sleep(0)
    asked = asyncio.create_task(ask(server))
    sent.set()

    assert (await asked).policy_version == 1
    await update


async def test_a_server_with_half_an_update_samples_nothing_until_the_next_whole_one() -> None:
    server = await started()

    async def lost() -> WeightBucket:
        raise WeightSyncError("its node is gone")

    with pytest.raises(WeightSyncError, match="its node is gone"):
        await server.load_weights(1, [weights(1), lost()])
    with pytest.raises(WeightSyncError, match="may hold a mixture of two versions"):
        await ask(server)
    assert await server.go_on() == -1
    await server.load_weights(2, [weights(2)])
    assert (await ask(server)).policy_version == 2


async def test_a_server_that_answers_but_samples_nothing_says_so_when_it_is_pinged() -> None:
    server = await started()
    await server.stall()
    asked = asyncio.create_task(ask(server))
    await asyncio.sleep(0)

    with pytest.raises(StalledError, match=r"none of the 1 requests in progress advanced"):
        await server.ping()
    asked.cancel()


async def test_every_server_of_a_run_samples_with_a_seed_of_its_own() -> None:
    seeds: list[int] = []

    async def start(config: Config, *, seed: int) -> Any:
        seeds.append(seed)
        raise EngineDeadError("this one need not start")

    for index in range(3):
        with pytest.raises(EngineDeadError):
            await VllmServer(Config.model_validate({"run": {"seed": 5}}), index, start_engine=start).start()
    assert len(set(seeds)) == 3
    assert seeds[0] == 5
