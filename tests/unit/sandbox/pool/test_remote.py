"""The pool over a remote provider: warm sandboxes, failing calls, and nothing left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import (
    SandboxConfigError,
    SandboxGoneError,
    SandboxRateLimitError,
    SandboxUnavailableError,
)
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import RUN_LABEL
from rayapp.sandbox.pool.build import build_pool, labels_of
from rayapp.sandbox.pool.pool import LeasePool
from support.fake_sandboxes import FakeProvider
from support.make import Clock
from support.timing import until

SPEC = SandboxSpec()
FAKE = {"type": "plugin", "name": "fake", "creations_per_s": 1000, "max_sandboxes": 4}


@asynccontextmanager
async def opened(
    provider: FakeProvider,
    *,
    clock: Callable[[], float] | None = None,
    fake: dict[str, object] | None = None,
    times: dict[str, float] | None = None,
    **keys: object,
) -> AsyncIterator[LeasePool]:
    providers = keys.pop("providers", None) or [FAKE | (fake or {})]
    config = SandboxConfig.model_validate({"providers": providers, **keys})
    pool = build_pool(config, "run-1", provider=provider, clock=clock or Clock(), grace_s=0.02, **times or {})
    try:
        yield pool
    finally:
        await pool.close(timeout_s=30.0)
        assert not provider.living, "a sandbox was left behind"


async def test_a_sandbox_is_made_on_demand_labelled_and_ended_after_one_lease() -> None:
    provider = FakeProvider()
    async with opened(provider) as pool:
        lease = await pool.acquire("worker", SPEC, timeout_s=30)
        assert provider.living[lease.connection.sandbox_id][RUN_LABEL] == "run-1"
        pool.release(lease.lease_id, is_clean=True)
        await until(lambda: provider.killed == [lease.connection.sandbox_id])


async def test_min_ready_sandboxes_wait_before_anybody_asks_and_are_replaced_when_taken() -> None:
    provider = FakeProvider()
    async with opened(provider, min_ready=2) as pool:
        pool.keep_ready(SPEC)
        await until(lambda: pool.stats()["sandbox/plugin/ready"] == 2)
        await pool.acquire("worker", SPEC, timeout_s=30)
        await until(lambda: pool.stats()["sandbox/plugin/ready"] == 2)
        assert len(provider.created) == 3


async def test_creations_keep_to_the_providers_rate() -> None:
    clock, provider = Clock(), FakeProvider()
    async with opened(provider, clock=clock, min_ready=4, fake={"creations_per_s": 0.5}) as pool:
        pool.keep_ready(SPEC)
        await until(lambda: len(provider.living) == 2)
        clock.now += 1.9
        pool.pump()
        assert provider.calls["create"] == 2
        clock.now += 0.1  # one token every two seconds
        pool.pump()
        await until(lambda: len(provider.living) == 3)


async def test_no_more_live_than_the_provider_allows_and_who_waits_gets_the_next() -> None:
    provider = FakeProvider()
    async with opened(provider, fake={"max_sandboxes": 1}) as pool:
        first = await pool.acquire("a", SPEC, timeout_s=30)
        second = asyncio.ensure_future(pool.acquire("b", SPEC, timeout_s=30))
        await asyncio.sleep(0)
        assert len(provider.living) == 1
        pool.release(first.lease_id)
        lease = await second
        assert lease.connection != first.connection


async def test_a_quota_means_fewer_sandboxes_and_everybody_is_served_in_the_end() -> None:
    provider = FakeProvider(max_alive=2)
    async with opened(provider) as pool:

        async def use(name: str) -> None:
            lease = await pool.acquire(name, SPEC, timeout_s=30)
            await asyncio.sleep(0)
            pool.release(lease.lease_id)

        await asyncio.gather(*(use(f"worker-{n}") for n in range(12)))
        assert pool.stats()["sandbox/plugin/limit"] == 2
        assert pool.stats()["sandbox/granted"] == 12


async def test_retry_after_is_kept_to() -> None:
    clock = Clock()
    provider = FakeProvider()
    provider.fail_next("create", SandboxRateLimitError("429", retry_after_s=20.0))
    async with opened(provider, clock=clock) as pool:
        waiting = asyncio.ensure_future(pool.acquire("a", SPEC, timeout_s=30))
        await until(lambda: "sandbox/plugin/failed_SandboxRateLimitError" in pool.stats())
        clock.now += 19.0
        pool.pump()
        await asyncio.sleep(0.01)
        assert provider.calls["create"] == 1
        clock.now += 1.5
        pool.pump()
        assert (await waiting).provider == "plugin"


async def test_a_wrong_key_fails_whoever_waits_at_once_with_the_reason() -> None:
    provider = FakeProvider()
    provider.fail_next("create", SandboxConfigError("the key is wrong"))
    async with opened(provider) as pool:
        with pytest.raises(SandboxConfigError, match="the key is wrong"):
            await pool.acquire("worker", SPEC, timeout_s=30)


async def test_who_waited_in_vain_learns_why_the_provider_gave_none() -> None:
    provider = FakeProvider()
    provider.fail_next("create", *(SandboxUnavailableError("the region is full") for _ in range(50)))
    async with opened(provider) as pool:
        with pytest.raises(SandboxUnavailableError, match="the region is full"):
            await pool.acquire("worker", SPEC, timeout_s=2.0)


async def test_a_creation_that_answers_after_its_caller_gave_up_serves_the_next_caller() -> None:
    provider = FakeProvider()
    provider.hang_next("create")
    async with opened(provider, fake={"max_sandboxes": 1}) as pool:
        with pytest.raises(SandboxUnavailableError):
            await pool.acquire("impatient", SPEC, timeout_s=2.0)
        provider.let_go()
        lease = await pool.acquire("patient", SPEC, timeout_s=30)
        assert [lease.connection and lease.connection.sandbox_id] == provider.created


async def test_a_creation_that_hangs_past_every_deadline_is_given_up_and_another_begins() -> None:
    provider = FakeProvider()
    provider.hang_next("create")
    async with opened(provider, clock=time.monotonic, times={"create_timeout_s": 2.0}) as pool:
        lease = await pool.acquire("worker", SPEC, timeout_s=30)
        assert [lease.connection and lease.connection.sandbox_id] == provider.created
        assert pool.stats()["sandbox/plugin/failed_SandboxDeadlineError"] == 1


@pytest.mark.parametrize(
    ("max_uses", "num_clean", "uses", "num_soiled"),
    [(10, 3, [1, 1, 1, 2], 1), (2, 9, [1, 1, 2], 0)],
    ids=["its third use soils it", "it may be used twice"],
)
async def test_a_used_sandbox_serves_again_only_while_it_looks_as_new_and_not_past_its_limit(
    max_uses: int, num_clean: int, uses: list[int], num_soiled: int
) -> None:
    looks = iter(["a" * 64] * num_clean + ["b" * 64] * 9)
    provider = FakeProvider(respond=lambda code: f"look:{next(looks)}\n")
    async with opened(provider, max_uses=max_uses, fake={"max_sandboxes": 1}) as pool:
        ids = []
        for _ in uses:
            lease = await pool.acquire("worker", SPEC, timeout_s=30)
            ids.append(lease.connection and lease.connection.sandbox_id)
            pool.release(lease.lease_id, is_clean=True)
        assert ids == [f"fake-{number}" for number in uses]
        assert pool.stats().get("sandbox/plugin/soiled", 0) == num_soiled


@pytest.mark.parametrize("which", ["new", "used"])
async def test_a_sandbox_whose_check_fails_in_an_unexpected_way_is_ended(which: str) -> None:
    looks = iter(["a" * 64] * (which == "used"))

    def respond(code: str) -> str:
        for look in looks:
            return f"look:{look}\n"
        raise RuntimeError("a bug of the SDK's")

    provider = FakeProvider(respond=respond)
    async with opened(provider, max_uses=10, fake={"max_sandboxes": 1}) as pool:
        waiting = asyncio.ensure_future(pool.acquire("worker", SPEC, timeout_s=60))
        if which == "used":
            pool.release((await waiting).lease_id, is_clean=True)
        await until(lambda: provider.killed == ["fake-1"])
        waiting.cancel()


async def test_a_dead_callers_sandbox_is_ended_and_never_lent_again() -> None:
    provider = FakeProvider(respond=lambda code: f"look:{'a' * 64}\n")
    async with opened(provider, max_uses=10) as pool:
        lease = await pool.acquire("dies", SPEC, timeout_s=30)
        await pool.acquire("lives", SPEC, timeout_s=30)
        assert pool.reclaim_of("dies") == 1
        await until(lambda: provider.killed == [lease.connection.sandbox_id])
        assert pool.stats()["sandbox/leased"] == 1


async def test_sandboxes_are_extended_before_the_provider_ends_them_and_idle_ones_are_not_kept() -> None:
    clock = Clock()
    provider = FakeProvider()
    times = {"sandbox_ttl_s": 600.0, "idle_timeout_s": 1000.0}
    async with opened(provider, clock=clock, min_ready=1, times=times) as pool:
        pool.keep_ready(SPEC)
        await until(lambda: pool.stats()["sandbox/plugin/ready"] == 1)
        clock.now += 301.0
        pool.tend()
        await until(lambda: provider.extended == {"fake-1": 600.0})
        clock.now += 1001.0
        pool.tend()
        await until(lambda: provider.killed == ["fake-1"])


async def test_the_sweep_ends_strays_and_forgets_the_dead() -> None:
    provider = FakeProvider()
    provider.living["stray"] = labels_of("run-1")
    provider.living["of another run"] = labels_of("run-2")
    async with opened(provider, min_ready=1) as pool:
        pool.keep_ready(SPEC)
        await until(lambda: pool.stats()["sandbox/plugin/ready"] == 1)
        pool.min_ready = 0
        provider.lose("fake-1")
        stock = pool.stock
        assert await stock.sweep(stray_after_s=0.0) == 1
        assert set(provider.living) == {"of another run"}
        assert pool.stats()["sandbox/plugin/ready"] == 0
        provider.living.clear()


async def test_a_stray_is_left_alone_until_no_creation_can_still_claim_it() -> None:
    clock = Clock()
    provider = FakeProvider()
    async with opened(provider, clock=clock) as pool:
        stock = pool.stock
        provider.living["unknown"] = labels_of("run-1")
        assert await stock.sweep() == 0
        clock.now += 91.0
        assert await stock.sweep() == 1


async def test_a_kill_that_fails_is_tried_again() -> None:
    provider = FakeProvider()
    async with opened(provider) as pool:
        lease = await pool.acquire("worker", SPEC, timeout_s=30)
        provider.fail_next("kill", SandboxUnavailableError("502"), SandboxGoneError("half an answer"))
        pool.release(lease.lease_id)
        await until(lambda: len(provider.killed) == 1)
        assert provider.calls["kill"] == 3


async def test_a_kind_nobody_waits_for_makes_way_for_one_that_somebody_wants() -> None:
    provider = FakeProvider()
    async with opened(provider, min_ready=1, fake={"max_sandboxes": 1}) as pool:
        pool.keep_ready(SPEC)
        await until(lambda: pool.stats()["sandbox/plugin/ready"] == 1)
        pool.min_ready = 0
        await pool.acquire("worker", SandboxSpec(template="other"), timeout_s=30)
        assert provider.killed == ["fake-1"]


async def test_closing_ends_what_is_leased_ready_and_being_made() -> None:
    provider = FakeProvider(latency_s=0.01)
    async with opened(provider, min_ready=1, fake={"max_sandboxes": 2}) as pool:
        await pool.acquire("worker", SPEC, timeout_s=30)
        await until(lambda: pool.stats()["sandbox/plugin/ready"] == 1)
        waiting = asyncio.ensure_future(pool.acquire("other", SandboxSpec(template="other"), timeout_s=30))
        await asyncio.sleep(0)
        assert await pool.close(timeout_s=30.0) == set()
        with pytest.raises(SandboxUnavailableError, match="closed"):
            await waiting
        assert not provider.living


async def test_with_many_failing_calls_everybody_is_served_and_nothing_is_left() -> None:
    provider = FakeProvider(fail_share=0.1, seed=7)
    config = SandboxConfig.model_validate({"providers": [FAKE | {"max_sandboxes": 8}]})
    pool = build_pool(config, "run-1", provider=provider)

    async def use(number: int) -> None:
        lease = await pool.acquire(f"worker-{number % 3}", SPEC, timeout_s=120)
        await asyncio.sleep(0.001)
        pool.release(lease.lease_id, is_clean=True)

    await asyncio.gather(*(use(number) for number in range(200)))
    await pool.close(timeout_s=5.0)
    # Strays of lost replies are listed and ended as well; one kill in ten fails, three times in a row one in 1000.
    stock = pool.stock
    while provider.living:
        await stock.sweep(stray_after_s=0.0)
    assert pool.stats()["sandbox/granted"] == 200


async def test_closing_a_pool_that_keeps_a_stock_makes_no_more() -> None:
    provider = FakeProvider(latency_s=0.001)
    async with opened(provider, fake={"max_sandboxes": 2}, min_ready=1) as pool:
        pool.keep_ready(SPEC)
        await until(lambda: pool.stats()["sandbox/plugin/ready"] == 1)

        assert await pool.close(timeout_s=30.0) == set()

        assert provider.calls["create"] == 1


async def test_what_could_not_be_listed_while_closing_is_not_called_clean() -> None:
    provider = FakeProvider()
    async with opened(provider) as pool:
        lease = await pool.acquire("worker", SPEC, timeout_s=30)
        pool.release(lease.lease_id)
        await until(lambda: not provider.living)
        provider.fail_next("list", *[SandboxUnavailableError("502")] * 10)

        assert await pool.close(timeout_s=30.0) == {"an unknown number: they could not be listed"}


async def test_what_is_ended_in_the_last_round_of_closing_is_not_called_left() -> None:
    provider = FakeProvider()
    async with opened(provider) as pool:
        lease = await pool.acquire("worker", SPEC, timeout_s=30)
        pool.release(lease.lease_id)
        await until(lambda: not provider.living)
        provider.living["stray"] = labels_of("run-1")
        # Each round tries three times: two rounds fail whole, the third comes through.
        provider.fail_next("kill", *[SandboxUnavailableError("503")] * 6)

        assert await pool.close(timeout_s=60.0) == set()
        assert not provider.living
