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
from rayapp.core.types import RequestId, SamplingParams
from rayapp.engine.admission import Gate
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.vllm_output import EngineLoad, EngineOutput
from rayapp.engine.weights.buckets import SharedWeights


class Recorded:
    """Records the calls of vLLM's AsyncLLM. Like vLLM, it schedules again by itself once everything is awake."""

    def __init__(self, *, is_v2: bool = True) -> None:
        self.calls: list[str] = []
        self.model_config = SimpleNamespace(
            enable_sleep_mode=True, enable_return_routed_experts=False, hf_config=None, is_multimodal_model=False,
            is_hybrid=False, quantization=None, get_num_experts=lambda: 0,
        )  # fmt: skip
        self.vllm_config = SimpleNamespace(use_v2_model_runner=is_v2)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> list[int]:
            shown = [str(value) for key, value in kwargs.items() if key in ("tags", "level", "mode")]
            self.calls.append(" ".join([name, *map(str, args), *shown]))
            return [4]

        return call


def engine_of(recorded: Recorded) -> VllmEngine:
    return VllmEngine(recorded, EngineLoad(), Gate(8), InHand(), EngineOutput(), 1.0)


async def test_the_kv_cache_gets_its_memory_when_no_learner_sends_any_more() -> None:
    recorded = Recorded()
    engine = engine_of(recorded)

    assert await engine.sleep()
    await engine.begin_update()
    await engine.finish_update(3, {})
    assert recorded.calls == [
        "pause_generation wait",
        "sleep 1 abort",
        "wake_up ['weights']",
        "start_weight_update",
        "finish_weight_update",
        "collective_rpc seal_weights",
    ]
    await engine.go_on()
    assert recorded.calls[6:] == ["wake_up ['kv_cache']"]
    assert engine.policy_version == 3


async def test_a_sleep_that_keeps_requests_stops_them_between_two_tokens_and_starts_none() -> None:
    recorded = Recorded()
    engine = engine_of(recorded)

    assert await engine.sleep(keeps_requests=True)
    assert await engine.sleep(keeps_requests=True)
    assert recorded.calls == ["pause_generation keep", "sleep 1 keep"]
    late = asyncio.create_task(engine.generate(RequestId("group", 0, 0), [1], SamplingParams(max_tokens=1, seed=0)))
    await asyncio.sleep(0.05)
    assert recorded.calls == ["pause_generation keep", "sleep 1 keep"]
    await engine.begin_update()
    await engine.finish_update(3, {})
    await engine.go_on()

    async with asyncio.timeout(60):
        while "add_request" not in recorded.calls[-1]:
            await asyncio.sleep(0)
    assert [call.split()[0] for call in recorded.calls[2:]] == [
        "wake_up", "start_weight_update", "finish_weight_update", "collective_rpc", "wake_up", "add_request",
    ]  # fmt: skip
    late.cancel()


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ({}, 2), ({"is_multimodal_model": True}, 1), ({"is_hybrid": True}, 1), ({"quantization": "fp8"}, 1),
        ({"get_num_experts": lambda: 8}, 1),
    ],
    ids=["dense", "pictures", "mixers", "fp8", "experts"],
)  # fmt: skip
async def test_only_weights_that_every_sync_sends_are_dropped(kind: dict[str, Any], level: int) -> None:
    recorded = Recorded()
    vars(recorded.model_config).update(kind)

    await engine_of(recorded).sleep(drops_weights=True)
    assert recorded.calls == ["pause_generation wait", f"sleep {level} abort"]


async def test_where_nothing_sleeps_requests_are_kept_too() -> None:
    recorded = Recorded()
    recorded.model_config.enable_sleep_mode = False
    engine = engine_of(recorded)

    assert not await engine.sleep(keeps_requests=True)
    assert recorded.calls == ["pause_generation keep"]


def test_preemptions_of_a_sleep_are_not_taken_for_a_lack_of_cache() -> None:
    load = EngineLoad()
    stats = SimpleNamespace(
        num_running_reqs=0, num_waiting_reqs=0, num_skipped_waiting_reqs=0, kv_cache_usage=0.0,
        prefix_cache_stats=SimpleNamespace(queries=0, hits=0),
    )  # fmt: skip
    load.forgive(3)
    for count in (2, 2, 1):
        load.record(stats, SimpleNamespace(num_preempted_reqs=count, num_generation_tokens=1))

    assert load.scalars()["preempted"] == 2


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
        async with asyncio.timeout(60):
            await server.begin_update()
        await server.finish_update(version, {})
    assert await server.go_on() == 2


async def test_learners_that_are_lost_within_an_update_leave_a_server_that_asks_to_be_replaced() -> None:
    engine = engine_of(Recorded())
    await engine.sleep()
    await engine.begin_update()  # the learners are lost: nothing follows

    with pytest.raises(WeightSyncError, match="last weight update never ended"):
        await engine.sleep()  # its weights are awake
    async with asyncio.timeout(60):
        with pytest.raises(WeightSyncError, match="an earlier weight update never ended"):
            await engine.begin_update()


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
