"""A driver killed with SIGKILL: on a Ray of its own standing, the reaper outlives it and ends the run's sandboxes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayapp.sandbox.leases import RUN_LABEL
from support.stubs.e2b_stub import E2BStub

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
REAPER = "sandbox-reaper-reaped"
START_TIMEOUT_S, WAIT_S = 200.0, 150.0

DRIVER = """
import asyncio, sys
from rayapp.driver.cluster import ready_pool, spawn_pool
from rayapp.config.config import Config
from actors.own_ray import ray_session
from rayapp.core.types import SandboxSpec

url, address, grace_s = sys.argv[1:4]
config = Config.model_validate({
    "run": {"name": "reaped"},
    "cluster": {"address": address},
    "sandbox": {
        "providers": [{"type": "e2b", "api_url": url, "sandbox_url": url, "creations_per_s": 10}],
        "reaper_grace_s": float(grace_s),
    },
})


async def main():
    with ray_session(config) as session:
        pool = spawn_pool(config)
        await ready_pool(config, pool, session, 100.0)
        for _ in range(2):
            await pool.acquire("driver", SandboxSpec(), timeout_s=60.0)
        print("leased", flush=True)
        if await asyncio.to_thread(sys.stdin.readline):
            await pool.close()
            print("closed", flush=True)


asyncio.run(main())
"""


async def until_async(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.05)


async def start_driver(url: str, ray: Any, grace_s: float) -> asyncio.subprocess.Process:
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, url, ray.address, str(grace_s),
        env=ray.environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert driver.stdout is not None
    assert driver.stderr is not None
    line = await asyncio.wait_for(driver.stdout.readline(), START_TIMEOUT_S)
    assert line == b"leased\n", (await driver.stderr.read()).decode()
    return driver


async def test_a_killed_driver_leaves_no_sandbox_and_the_next_start_replaces_its_reaper(standing_ray: Any) -> None:
    stub = E2BStub()
    async with stub.running() as url:
        other = stub.boxes.create(template="base", labels={RUN_LABEL: "other"}, ttl_s=600)
        first = await start_driver(url, standing_ray, grace_s=20.0)
        left = set(stub.boxes.living) - {other.id}
        assert len(left) >= 2
        first.kill()
        await first.wait()

        second = await start_driver(url, standing_ray, grace_s=8.0)
        # What the first left was swept at the start of the second.
        assert left.isdisjoint(stub.boxes.living)
        replaced_at, mine = time.monotonic(), set(stub.boxes.living) - {other.id}
        await until_async(lambda: time.monotonic() > replaced_at + 25.0, 60.0, "the first reaper's grace is over")
        assert mine <= set(stub.boxes.living), "the first run's reaper ended the second run's sandboxes"

        second.kill()
        await second.wait()
        await until_async(lambda: mine.isdisjoint(stub.boxes.living), WAIT_S, "the sandboxes are gone")
        # None was made in between, and another run's lives on.
        assert set(stub.boxes.living) == {other.id}
        await asyncio.to_thread(standing_ray.wait_until_gone, REAPER)  # it ends itself


async def test_a_run_that_ends_in_order_takes_its_reaper_along(standing_ray: Any) -> None:
    stub = E2BStub()
    async with stub.running() as url:
        driver = await start_driver(url, standing_ray, grace_s=300.0)
        assert REAPER in await asyncio.to_thread(standing_ray.actors)

        out, err = await asyncio.wait_for(driver.communicate(b"close\n"), WAIT_S)

        assert out == b"closed\n", err.decode()
        assert not stub.boxes.living
        await asyncio.to_thread(standing_ray.wait_until_gone, REAPER)  # it ends itself
