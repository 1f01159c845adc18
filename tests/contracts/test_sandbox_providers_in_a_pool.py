"""Every remote provider from its configuration through the pool to a verdict, and nothing left at its service."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import RUN_LABEL
from rayapp.sandbox.pool.build import open_pool
from support.providers import key_in_environment, section_of, stub_of


@asynccontextmanager
async def service(kind: str) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """A service on loopback, and the section of a configuration that names it."""
    stub = stub_of(kind)
    fields: dict[str, Any] = {"max_sandboxes": 3}
    fields |= {"creations_per_s": 100} if kind != "mcp" else {}
    with key_in_environment(kind):
        async with stub.running() as url:
            yield stub, section_of(kind, url, **fields)


@pytest.mark.parametrize("kind", ["e2b", "kruise", "daytona", "mcp"])
async def test_tasks_share_a_providers_sandboxes_and_the_results_say_where_they_ran(kind: str) -> None:
    async with service(kind) as (stub, section):
        config = SandboxConfig.model_validate({"providers": [section], "max_uses": 2})
        async with open_pool(config, "run-of-the-test") as (client, _):

            async def score(number: int) -> object:
                async with client.lease(SandboxSpec(), timeout_s=60) as sandbox:
                    if kind != "mcp":  # whose sandboxes live on at the server for their time
                        assert len(stub.boxes.living) <= 3, "no more than max_sandboxes"
                        assert {box.labels[RUN_LABEL] for box in stub.boxes.living.values()} == {"run-of-the-test"}
                    report = await sandbox.call_function("def f(x): return x * x", "f", [[number]], timeout_s=20)
                    assert report.exec.isolation == section["type"]
                    return report.calls[0].value

            assert await asyncio.gather(*(score(n) for n in range(5))) == [n * n for n in range(5)]
        assert kind == "mcp" or not stub.boxes.living


WORKER = """
import asyncio, json, sys
from pydantic import TypeAdapter
from rayapp.config.sandbox import ProviderConfig
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.providers import remote_provider

async def main(section, connection):
    provider = remote_provider(TypeAdapter(ProviderConfig).validate_python(section))
    sandbox = provider.attach(Connection(**connection), SandboxSpec())
    long = ["sh", "-c", "echo > ~/it-runs; sleep 600"]
    running = asyncio.create_task(sandbox.run_command(long, timeout_s=600))
    looks = "import os; print(os.path.exists(os.path.expanduser('~/it-runs')))"
    while (await sandbox.run_code(looks, timeout_s=20)).stdout != "True\\n":
        pass
    print("it runs", flush=True)
    await running

asyncio.run(main(*map(json.loads, sys.argv[1:])))
"""


async def test_a_worker_that_is_killed_while_code_runs_leaves_no_sandbox() -> None:
    async with service("e2b") as (stub, section):
        config = SandboxConfig.model_validate({"providers": [section]})
        async with open_pool(config, "run-of-the-test") as (_, pool):
            lease = await pool.acquire("worker", SandboxSpec(), timeout_s=60)
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", WORKER, json.dumps(section), json.dumps(asdict(lease.connection))),
                cwd=Path(__file__).parents[2],
                stdout=asyncio.subprocess.PIPE,
            )
            assert await worker.stdout.readline() == b"it runs\n"
            worker.kill()
            await worker.wait()
            assert pool.reclaim_of("worker") == 1  # as when the driver replaces it
            async with asyncio.timeout(60):
                while lease.connection.sandbox_id in stub.boxes.living:
                    await asyncio.sleep(0.01)
