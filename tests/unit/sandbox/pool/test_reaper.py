"""The reaper: silence ends a run's sandboxes, a living run keeps them, and failing providers are retried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rayapp.core.errors import SandboxUnavailableError
from rayapp.sandbox.leases import RUN_LABEL
from rayapp.sandbox.pool.reaper import Reaper, labels_to_reap, reap
from support.fake_sandboxes import FakeProvider
from support.make import Clock

MINE = {RUN_LABEL: "run-1", "rayapp-host": "here"}
ELSEWHERE = {RUN_LABEL: "run-1", "rayapp-host": "there"}
GRACE_S = 100.0


def make(provider: FakeProvider, clock: Callable[[], float]) -> Reaper:
    return Reaper({"fake": provider}, grace_s=GRACE_S, pause_s=0.001, clock=clock)


async def test_silence_ends_exactly_what_carries_the_labels_of_the_run() -> None:
    provider, clock = FakeProvider(), Clock()
    provider.living |= {"mine": MINE, "of the same run on another host": ELSEWHERE, "other": {RUN_LABEL: "run-2"}}
    reaper = make(provider, clock)
    reaper.beat(MINE)
    clock.now += GRACE_S

    assert await asyncio.wait_for(reaper.watch(), 60) == 1

    assert set(provider.living) == {"of the same run on another host", "other"}
    assert provider.is_closed


async def test_a_run_that_ends_in_order_is_not_swept() -> None:
    provider, clock = FakeProvider(), Clock()
    provider.living["mine"] = MINE
    reaper = make(provider, clock)
    reaper.beat(MINE)
    watching = asyncio.create_task(reaper.watch())

    reaper.dismiss()

    assert await asyncio.wait_for(watching, 60) == 0
    assert "mine" in provider.living
    assert provider.calls["list"] == 0


async def test_a_run_that_never_spoke_ends_nobodys_sandboxes() -> None:
    provider, clock = FakeProvider(), Clock()
    provider.living["somebody's"] = {}
    reaper = make(provider, clock)
    clock.now += GRACE_S

    assert await asyncio.wait_for(reaper.watch(), 60) == 0

    assert set(provider.living) == {"somebody's"}


async def test_a_provider_that_fails_is_asked_until_nothing_is_listed() -> None:
    provider, clock = FakeProvider(), Clock()
    provider.living |= {"a": MINE, "b": MINE}
    provider.fail_next("list", SandboxUnavailableError("502"), SandboxUnavailableError("502"))
    provider.fail_next("kill", SandboxUnavailableError("503"))
    reaper = make(provider, clock)
    reaper.beat(MINE)
    clock.now += GRACE_S

    assert await asyncio.wait_for(reaper.watch(), 60) == 2

    # Two listings that fail, one whose first kill fails, one that ends the rest, one that finds nothing.
    assert provider.calls["list"] == 5
    assert not provider.living


async def test_a_run_that_is_heard_again_keeps_what_it_has_left() -> None:
    provider, clock = FakeProvider(), Clock()
    provider.living["a"] = MINE
    provider.fail_next("kill", SandboxUnavailableError("503"))
    provider.hang_next("list")
    reaper = make(provider, clock)
    reaper.beat(MINE)
    clock.now += GRACE_S
    watching = asyncio.create_task(reaper.watch())
    while not provider.calls["list"]:
        await asyncio.sleep(0)

    reaper.beat(MINE)
    provider.let_go()
    while not provider.calls["kill"]:
        await asyncio.sleep(0)
    reaper.dismiss()

    assert await asyncio.wait_for(watching, 60) == 0
    assert "a" in provider.living
    assert provider.calls["list"] == 1


async def test_a_dry_run_names_and_ends_nothing() -> None:
    provider = FakeProvider()
    provider.living |= {"a": MINE, "b": {RUN_LABEL: "run-2"}}

    found = [each async for each in reap({"fake": provider}, labels_to_reap("run-1"), dry_run=True)]

    assert [(each.sandbox_id, each.ended, each.error) for each in found] == [("a", False, None)]
    assert set(provider.living) == {"a", "b"}


async def test_one_provider_that_cannot_be_listed_does_not_spare_the_next() -> None:
    broken, sound = FakeProvider(name="broken"), FakeProvider(name="sound")
    broken.fail_next("list", SandboxUnavailableError("502"))
    sound.living["a"] = MINE

    found = [each async for each in reap({"broken": broken, "sound": sound}, labels_to_reap("run-1"))]

    assert [(each.provider, each.ended) for each in found] == [("broken", False), ("sound", True)]
    assert isinstance(found[0].error, SandboxUnavailableError)
    assert not sound.living
