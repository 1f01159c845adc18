"""Speed of the sandbox pool itself: the cost of a lease if a sandbox is free, thousands of leases at once, and the
growth of memory after a hundred thousand leases.

    python benchmarks/sandbox_pool.py             everything, about five minutes; prints one JSON line per part
    python benchmarks/sandbox_pool.py rate        acquire/release through the Ray actor, 10,000 a minute
    python benchmarks/sandbox_pool.py flood       as many as the actor can take
    python benchmarks/sandbox_pool.py at-once     2,000 leases at once, for which a provider has to make sandboxes
    python benchmarks/sandbox_pool.py growth      100,000 leases: memory and descriptors of the actor's process
    python benchmarks/sandbox_pool.py growth-short growth-here     10,000 through the actor, 100,000 without Ray

The benchmark starts a separate Ray with one CPU. All callers are in this process, as in a rollout worker: each call
goes to the actor's process and back. The sandboxes of the fake provider run nothing, so only the pool is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import ray

from actors.handles import SandboxPoolHandle
from actors.spawn import kill, spawn
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.pool.build import PoolHere, open_pool
from rayapp.sandbox.pool.client import Pool

SPEC = SandboxSpec()
LEASES_PER_MINUTE = 10_000
_ROUND = 10_000
Numbers = dict[str, float]


def local_config() -> SandboxConfig:
    """Return a config with local sandboxes. Callers make these in their own processes, so a lease is always free."""
    return SandboxConfig.model_validate({"providers": [{"type": "local", "max_sandboxes": 256}]})


def fake_config(num_sandboxes: int, *, latency_s: float = 0.0) -> SandboxConfig:
    """Return a config with a provider of remote sandboxes that answers after `latency_s` and refuses nothing. Each
    sandbox serves one lease.
    """
    fake = {
        "type": "plugin",
        "name": "fake",
        "options": {"latency_s": latency_s},
        "max_sandboxes": num_sandboxes,
        "creations_per_s": 1000,
    }
    return SandboxConfig.model_validate({"providers": [fake]})


async def timed(pool: Pool, holder: str, timeout_s: float = 120.0) -> float:
    """Take one lease and give it back. Return the seconds until the lease was granted."""
    started = time.perf_counter()
    lease = await pool.acquire(holder, SPEC, timeout_s=timeout_s, lease_id=secrets.randbits(62))
    waited_s = time.perf_counter() - started
    await pool.release(lease.lease_id, True)
    return waited_s


async def rate(pool: SandboxPoolHandle) -> Numbers:
    """Request one lease every 6 ms for 30 s, without waiting for earlier leases, so that all waits are measured."""
    num_leases = LEASES_PER_MINUTE // 2
    loop = asyncio.get_running_loop()
    begin = loop.time()
    tasks = []
    for index in range(num_leases):
        await asyncio.sleep(max(0.0, begin + index * 60 / LEASES_PER_MINUTE - loop.time()))
        tasks.append(asyncio.create_task(timed(pool, f"worker-{index % 8}")))
    waits_s = await asyncio.gather(*tasks)
    return {"leases_per_min": num_leases / (loop.time() - begin) * 60, **percentiles_ms(waits_s)}


async def flood(pool: SandboxPoolHandle) -> Numbers:
    """Run 64 callers. Each takes its next lease as soon as it has given one back."""
    num_leases, started = 20_000, time.perf_counter()
    waits_s = await from_callers(pool, num_leases, callers=64)
    return {"leases_per_min": num_leases / (time.perf_counter() - started) * 60, **percentiles_ms(waits_s)}


async def at_once(pool: SandboxPoolHandle) -> Numbers:
    """Request 2,000 leases at the same time, before any sandbox exists. Hold all of them until the last one is
    granted.
    """
    num_leases, started = 2_000, time.perf_counter()
    calls = (pool.acquire(f"worker-{index % 8}", SPEC, timeout_s=120.0) for index in range(num_leases))
    leases = await asyncio.gather(*calls)
    granted_s = time.perf_counter() - started
    stats = await pool.stats()
    distinct = len({lease.connection.sandbox_id for lease in leases if lease.connection is not None})
    await asyncio.gather(*(pool.release(lease.lease_id, False) for lease in leases))
    started = time.perf_counter()
    while (await pool.stats())["sandbox/plugin/alive"]:  # noqa: ASYNC110  (the actor tells in no other way)
        await asyncio.sleep(0.05)
    return {
        "leases": float(num_leases),
        "leased_together": stats["sandbox/leased"],
        "distinct_sandboxes": float(distinct),
        "all_granted_s": granted_s,
        "all_ended_s": time.perf_counter() - started,
    }


async def growth(pool: SandboxPoolHandle) -> Numbers:
    """Measure memory and descriptors of the actor's process after 10,000 leases, and after 100,000 more."""
    return await grown(pool, await process_of(pool), 100_000)


async def growth_short(pool: SandboxPoolHandle) -> Numbers:
    """Measure the growth with a tenth of the leases, for a machine that other programs use."""
    return await grown(pool, await process_of(pool), 10_000)


async def grown(pool: SandboxPoolHandle | PoolHere, process: psutil.Process, num_leases: int) -> Numbers:
    """Measure memory and descriptors of the pool's process, after a first round of leases and after each further
    tenth.
    """
    await from_callers(pool, _ROUND, callers=64)
    found: Numbers = {"leases": float(num_leases)}
    for done in range(0, num_leases + 1, num_leases // 10):
        memory_mib, descriptors = usage(process)
        found |= {f"mib_at_{done}": memory_mib, f"descriptors_at_{done}": descriptors}
        if done < num_leases:
            await from_callers(pool, num_leases // 10, callers=64)
    return found | {"left": (await pool.stats())["sandbox/leased"]}


async def from_callers(pool: Pool, num_leases: int, *, callers: int) -> list[float]:
    """Run several callers, each of which takes leases one after the other. Return the waits in seconds."""
    indices = iter(range(num_leases))

    async def call() -> list[float]:
        return [await timed(pool, f"worker-{index % 8}") for index in indices]

    return [wait_s for own in await asyncio.gather(*(call() for _ in range(callers))) for wait_s in own]


async def process_of(pool: SandboxPoolHandle) -> psutil.Process:
    """Return the actor's process: the Ray worker whose title names its class."""
    await pool.stats()
    for process in psutil.Process().children(recursive=True):
        if "PoolActor" in " ".join(process.cmdline()):
            return process
    raise SystemExit("the pool's process is not among this process's children")


def usage(process: psutil.Process) -> tuple[float, float]:
    """Return resident memory in MiB, and the number of open descriptors."""
    return process.memory_info().rss / 2**20, float(process.num_fds())


def percentiles_ms(waits_s: list[float]) -> Numbers:
    """Return percentiles of the waits in ms, by nearest rank."""
    ordered = sorted(waits_s)
    ranks = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1000 for name, share in ranks.items()}


PARTS: dict[str, tuple[Callable[[SandboxPoolHandle], Awaitable[Numbers]], SandboxConfig, int]] = {
    # Part -> (function, sandbox config, number of sandboxes to prepare).
    "rate": (rate, fake_config(64), 64),
    "flood": (flood, local_config(), 0),
    "at-once": (at_once, fake_config(2_000, latency_s=0.05), 0),
    "growth": (growth, fake_config(128), 64),
    "growth-short": (growth_short, fake_config(128), 64),
}
HERE = "growth-here"


class Here(PoolHere):
    """The pool in this process, without Ray's actor around it."""

    async def stats(self) -> Numbers:
        return self._pool.stats()


async def growth_here() -> Numbers:
    """Measure memory and descriptors over 100,000 leases of a pool in this process, without Ray."""
    async with open_pool(fake_config(128), "bench-here") as (_, pool):
        return await grown(Here(pool), psutil.Process(), 100_000)


async def measure(part: str) -> Numbers:
    """Measure one part with its own pool."""
    what, config, num_ready = PARTS[part]
    name = f"sandbox-pool-{part}"
    config = config.model_copy(update={"min_ready": num_ready})
    pool = SandboxPoolHandle(spawn("sandbox-pool", name, config, f"bench-{part}"), name)
    try:
        await pool.ready(120.0)
        while num_ready and (await pool.stats())["sandbox/plugin/ready"] < num_ready:  # noqa: ASYNC110  (as above)
            await asyncio.sleep(0.05)
        return await what(pool)
    finally:
        await pool.close()
        kill(pool.actor)


def offer_fake_provider(folder: Path) -> None:
    """Offer the tests' fake provider as a plug-in, to this process and to the processes that it starts."""
    info = folder / "fake_sandboxes-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-sandboxes\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rayapp.sandbox_providers]\nfake = support.fake_sandboxes:make_provider\n")
    places = [str(folder), str(Path(__file__).parents[1] / "tests")]
    sys.path += places
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])


def start_ray(attempts: int = 4) -> None:
    """Start a separate Ray. Try several times: Ray gives its node a fixed 30 s to start, which is too short on a busy
    machine.
    """
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "180")
    for attempt in range(attempts):
        try:
            ray.init(address="local", num_cpus=1, num_gpus=0, include_dashboard=False, object_store_memory=100 << 20)
            return
        except Exception as error:  # boundary: Ray raises a bare Exception here, and other classes for other delays
            ray.shutdown()
            if attempt == attempts - 1:
                raise
            print(f"Ray did not start: {error}; again", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parts = parser.parse_args().parts or list(PARTS)[:4]
    if unknown := [part for part in parts if part not in (*PARTS, HERE)]:
        parser.error(f"unknown part {unknown[0]}; there are: {', '.join(PARTS)}, {HERE}")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Ray starts its workers with nice 15; rayapp's runs don't (actors/own_ray.py).
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory() as folder:
        offer_fake_provider(Path(folder))
        measure_parts(parts)


def measure_parts(parts: list[str]) -> None:
    """Measure the parts one after the other, each in its own pool, and print a JSON line per part."""
    if parts != [HERE]:
        start_ray()
    try:
        for part in parts:
            load = os.getloadavg()[0]
            numbers = asyncio.run(growth_here() if part == HERE else measure(part))
            rounded = {name: round(value, 2) for name, value in numbers.items()}
            print(json.dumps({"part": part, "load_before": load, **rounded}), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
