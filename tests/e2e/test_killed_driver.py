"""A driver killed with SIGKILL, on a Ray that it did not start, leaves no remote sandboxes behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rayapp.sandbox.leases import RUN_LABEL
from support.stubs.e2b_stub import E2BStub

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
START_TIMEOUT_S, WAIT_S = 200.0, 150.0

DRIVER = """
import asyncio, sys
from rayapp.driver.cluster import spawn_pool
from rayapp.config.config import Config
from actors.own_ray import ray_session
from rayapp.core.types import SandboxSpec

url, address = sys.argv[1:3]
config = Config.model_validate({
    "run": {"name": "killed"},
    "cluster": {"address": address},
    "sandbox": {
        "providers": [{"type": "e2b", "api_url": url, "sandbox_url": url, "creations_per_s": 10}],
    },
})


async def main():
    with ray_session(config):
        pool = spawn_pool(config)
        await pool.ready(100.0)
        for _ in range(2):
            await pool.acquire("driver", SandboxSpec(), timeout_s=60.0)
        print("leased", flush=True)
        if await asyncio.to_thread(sys.stdin.readline):
            await pool.close()
            print("closed", flush=True)


asyncio.run(main())
"""


async def start_driver(url: str, ray: Any) -> asyncio.subprocess.Process:
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, url, ray.address,
        env=ray.environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert driver.stdout is not None
    assert driver.stderr is not None
    line = await asyncio.wait_for(driver.stdout.readline(), START_TIMEOUT_S)
    assert line == b"leased\n", (await driver.stderr.read()).decode()
    return driver


async def test_sandboxes_of_a_killed_driver_end_within_minutes_or_at_the_next_start(standing_ray: Any) -> None:
    stub = E2BStub()
    async with stub.running() as url:
        other = stub.boxes.create(template="base", labels={RUN_LABEL: "other"}, ttl_s=600)
        first = await start_driver(url, standing_ray)
        left = {box.id: box.ends_at - time.time() for box in stub.boxes.living.values() if box is not other}
        assert len(left) >= 2
        assert max(left.values()) <= 300
        first.kill()
        await first.wait()

        second = await start_driver(url, standing_ray)
        assert left.keys().isdisjoint(stub.boxes.living), "the second start has swept what the first left"
        out, err = await asyncio.wait_for(second.communicate(b"close\n"), WAIT_S)

        assert out == b"closed\n", err.decode()
        assert set(stub.boxes.living) == {other.id}
