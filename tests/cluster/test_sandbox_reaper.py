"""A driver killed with SIGKILL: on a Ray of its own standing, the reaper outlives it and ends the run's sandboxes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayapp.sandbox.leases import RUN_LABEL
from rayapp.testing.stubs.e2b_stub import API_KEY, E2BStub

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
RUN = "reaped"
START_TIMEOUT_S, WAIT_S = 200.0, 150.0

DRIVER = """
import asyncio, sys
from rayapp.driver.cluster import ready_pool, spawn_pool
from rayapp.config.config import Config
from actors.setup.session import ray_session
from rayapp.core.types import SandboxSpec

url, address, grace_s = sys.argv[1:4]
config = Config.model_validate({
    "run": {"name": "reaped"},
    "cluster": {"address": address},
    "sandbox": {
        "providers": [{"type": "e2b", "api_url": url, "sandbox_url": url, "creation_burst": 5, "creations_per_s": 10}],
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


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "E2B_API_KEY": API_KEY,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_AUTH_MODE": "disabled",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray that belongs to no driver, as `ray start --head` makes one, on ports of its own."""
    log = tmp_path_factory.mktemp("ray") / "log"
    for attempt in range(3):
        port, head = start_head(log, attempt)
        try:
            wait_for_head(head, log)
            # Ray gives its node 30 s, fixed, to come up: too few where others use the processor.
            if head.poll() is None or attempt == 2:
                assert head.poll() is None, log.read_text()
                yield f"127.0.0.1:{port}"
                return
        finally:
            stop_head(head)


def start_head(log: Path, attempt: int) -> tuple[int, subprocess.Popen[bytes]]:
    port = free_port()
    # Short: a Unix socket's path has to fit in 107 bytes.
    folder = Path("/tmp") / f"rt{os.getpid()}{'abc'[attempt]}"
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        f"--temp-dir={folder}", "--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000",
        "--include-dashboard=false", "--node-ip-address=127.0.0.1",
        f"--ray-client-server-port={free_port()}", "--disable-usage-stats",
    ]  # fmt: skip
    with log.open("w") as sink:
        return port, subprocess.Popen(command, env=environment(), stdout=sink, stderr=sink, start_new_session=True)


def wait_for_head(head: subprocess.Popen[bytes], log: Path) -> None:
    until(lambda: "--block" in log.read_text() or head.poll() is not None, START_TIMEOUT_S, "Ray is up")


def stop_head(head: subprocess.Popen[bytes]) -> None:
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


async def until_async(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.05)


async def start_driver(url: str, address: str, grace_s: float) -> asyncio.subprocess.Process:
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, url, address, str(grace_s),
        env=environment(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert driver.stdout is not None
    assert driver.stderr is not None
    line = await asyncio.wait_for(driver.stdout.readline(), START_TIMEOUT_S)
    assert line == b"leased\n", (await driver.stderr.read()).decode()
    return driver


def reaper_exists(address: str) -> bool:
    program = (
        "import ray, sys\n"
        f"ray.init(address={address!r}, namespace='rayapp-{RUN}', logging_level='ERROR')\n"
        "named = ray.util.list_named_actors()\n"
        f"sys.exit(0 if 'sandbox-reaper-{RUN}' in named else 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment(), timeout=120, check=False)
    assert done.returncode in (0, 3)
    return done.returncode == 0


async def test_a_killed_driver_leaves_no_sandbox(ray_address: str) -> None:
    stub = E2BStub()
    async with stub.running() as url:
        other = stub.boxes.create(template="base", labels={RUN_LABEL: "other"}, ttl_s=600)
        driver = await start_driver(url, ray_address, grace_s=8.0)
        mine = set(stub.boxes.living) - {other.id}
        assert len(mine) >= 2

        driver.kill()
        await driver.wait()

        await until_async(lambda: mine.isdisjoint(stub.boxes.living), WAIT_S, "the sandboxes are gone")
        # None was made in between, and another run's lives on.
        assert set(stub.boxes.living) == {other.id}
        gone = asyncio.to_thread(until, lambda: not reaper_exists(ray_address), WAIT_S, "the reaper ends itself")
        await gone


async def test_a_run_that_ends_in_order_takes_its_reaper_along(ray_address: str) -> None:
    stub = E2BStub()
    async with stub.running() as url:
        driver = await start_driver(url, ray_address, grace_s=300.0)
        assert await asyncio.to_thread(reaper_exists, ray_address)

        out, err = await asyncio.wait_for(driver.communicate(b"close\n"), WAIT_S)

        assert out == b"closed\n", err.decode()
        assert not stub.boxes.living
        await asyncio.to_thread(until, lambda: not reaper_exists(ray_address), WAIT_S, "the reaper ends itself")


async def test_the_next_start_of_a_run_replaces_the_reaper_of_the_one_before(ray_address: str) -> None:
    stub = E2BStub()
    async with stub.running() as url:
        first = await start_driver(url, ray_address, grace_s=20.0)
        left = set(stub.boxes.living)
        first.kill()
        await first.wait()

        second = await start_driver(url, ray_address, grace_s=300.0)

        # What the first left was swept at the start of the second.
        assert left.isdisjoint(stub.boxes.living)
        replaced_at = time.monotonic()
        mine = set(stub.boxes.living)
        await until_async(lambda: time.monotonic() > replaced_at + 25.0, 60.0, "the first reaper's grace is over")
        assert mine <= set(stub.boxes.living), "the first run's reaper ended the second run's sandboxes"
        await asyncio.wait_for(second.communicate(b"close\n"), WAIT_S)
        assert not stub.boxes.living
