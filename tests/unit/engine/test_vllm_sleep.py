"""An engine on a shared GPU: the order in which it gets memory back around an update. A stub replaces vLLM, which can't
sleep on a CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from actors.vllm_server import VllmServer
from rayapp.config.config import Config
from rayapp.core.errors import WeightSyncError
from rayapp.core.timing import InHand
from rayapp.core.types import SamplingParams
from rayapp.engine.admission import ConcurrencyLimit, Gate
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.vllm_output import EngineLoad, EngineOutput
from rayapp.engine.weights.buckets import SharedWeights


class Recorded:
    """Records the calls of vLLM's AsyncLLM. Like vLLM, it schedules again by itself once everything is awake."""

    def __init__(self, *, is_v2: bool = True) -> None:
        self.calls: list[str] = []
        self.model_config = SimpleNamespace(enable_sleep_mode=True, enable_return_routed_experts=False)
        self.vllm_config = SimpleNamespace(use_v2_model_runner=is_v2)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> list[int]:
            shown = [str(value) for key, value in kwargs.items() if key in ("tags", "level", "mode")]
            self.calls.append(" ".join([name, *map(str, args), *shown]))
            return [4]

        return call


def engine_of(recorded: Recorded) -> VllmEngine:
    return VllmEngine(recorded, EngineLoad(), Gate(ConcurrencyLimit(ceiling=8)), InHand(), EngineOutput(), 1.0)


async def test_the_kv_cache_gets_its_memory_when_no_learner_sends_any_more() -> None:
    recorded = Recorded()
    engine = engine_of(recorded)

    assert await engine.sleep()
    await engine.begin_update()
    await engine.finish_update(3, {})
    assert recorded.calls == [
        "pause_generation wait",
        "sleep 1",
        "wake_up ['weights']",
        "start_weight_update",
        "finish_weight_update",
        "collective_rpc seal_weights",
    ]
    await engine.go_on()
    assert recorded.calls[6:] == ["wake_up ['kv_cache']"]
    assert engine.policy_version == 3


async def test_weights_in_shared_memory_wake_a_sleeping_engine_in_the_same_order() -> None:
    recorded = Recorded()
    engine = engine_of(recorded)
    await engine.sleep()
    recorded.calls.clear()

    await engine.begin_update("memory")
    await engine.receive_weights(SharedWeights(path="/proc/1/fd/2", entries=(), checksums={}))
    with pytest.raises(WeightSyncError, match="last weight update never ended"):
        await engine.sleep()  # its weights are awake
    assert await engine.finish_update(3, {}) == 4
    await engine.go_on()

    called = [" ".join(call.split()[:2]) for call in recorded.calls]
    assert called == ["wake_up ['weights']", "collective_rpc load_shared_weights", "wake_up ['kv_cache']"]
    assert engine.policy_version == 3


async def test_learners_that_are_lost_after_an_update_leave_a_server_that_takes_the_next() -> None:
    recorded = Recorded()

    async def start(config: Config, *, seed: int) -> VllmEngine:
        return engine_of(recorded)

    server = VllmServer(Config(), 0, start_engine=start)
    server._engine = await start(Config(), seed=0)
    for version in (1, 2):  # go_on is not called after the first
        async with asyncio.timeout(10.0):
            await server.begin_update()
        await server.finish_update(version, {})
    assert await server.go_on() == 2


async def test_learners_that_are_lost_within_an_update_leave_a_server_that_asks_to_be_replaced() -> None:
    engine = engine_of(Recorded())
    await engine.sleep()
    await engine.begin_update()  # the learners are lost: nothing follows

    with pytest.raises(WeightSyncError, match="last weight update never ended"):
        await engine.sleep()  # its weights are awake
    async with asyncio.timeout(10.0):
        with pytest.raises(WeightSyncError, match="an earlier weight update never ended"):
            await engine.begin_update()


async def test_one_that_sleeps_is_not_put_to_sleep_again() -> None:
    recorded = Recorded()
    engine = engine_of(recorded)
    assert await engine.sleep()
    before = list(recorded.calls)
    assert await engine.sleep()
    assert recorded.calls == before


async def test_a_cohort_after_a_sleep_starts_from_a_scheduler_that_stands_still() -> None:
    recorded = Recorded()
    engine = engine_of(recorded)
    await engine.sleep()
    await engine.begin_update()
    await engine.finish_update(1, {})
    await engine.go_on()

    recorded.calls.clear()
    await engine._start_cohort([SimpleNamespace(sampling=SamplingParams(max_tokens=1, seed=7), queue=Gone())] * 2)  # type: ignore[list-item]
    # vLLM schedules by itself once it is awake: it must be paused again, or the first request would run without the
    # second.
    assert recorded.calls == ["pause_generation wait", "resume_generation"]


@pytest.mark.parametrize("is_v2", [True, False])
async def test_the_generator_of_all_requests_is_seeded_where_there_is_one(is_v2: bool) -> None:
    recorded = Recorded(is_v2=is_v2)
    cohort = [SimpleNamespace(sampling=SamplingParams(max_tokens=1, seed=7), queue=Gone())] * 2
    await engine_of(recorded)._start_cohort(cohort)  # type: ignore[arg-type]
    assert ("collective_rpc seed_sampling" in recorded.calls) is not is_v2


class Gone:
    """A caller that has gone: nothing is queued."""

    def done(self) -> bool:
        return True
