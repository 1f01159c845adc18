"""A pool in this process: leases wait for one another, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import SandboxConfigError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.local.provider import LocalProvider
from rayapp.sandbox.pool.build import open_pool
from rayapp.sandbox.pool.client import PoolClient

SPEC = SandboxSpec()
ONE_SANDBOX = SandboxConfig.model_validate({"providers": [{"type": "local", "max_sandboxes": 1}]})


@pytest.fixture
async def provider() -> AsyncIterator[LocalProvider]:
    made = LocalProvider(max_slots=1)
    yield made
    await made.close()


@pytest.fixture
async def source(provider: LocalProvider) -> AsyncIterator[PoolClient]:
    async with open_pool(ONE_SANDBOX, "test", local=provider) as (client, _):
        yield client


async def living(provider: LocalProvider) -> list[str]:
    return [sandbox_id async for sandbox_id in provider.list({})]


async def test_a_sandbox_lives_as_long_as_its_lease(provider: LocalProvider, source: PoolClient) -> None:
    async with source.lease(SPEC, timeout_s=30) as sandbox:
        assert await sandbox.alive()
        assert await living(provider) == [sandbox.id]
    assert not await sandbox.alive()
    assert await living(provider) == []
    with pytest.raises(SandboxConfigError, match="template"):
        async with source.lease(SandboxSpec(template="x"), timeout_s=30):
            pass


async def test_an_error_or_a_cancellation_in_the_block_gives_the_sandbox_back(
    provider: LocalProvider, source: PoolClient
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with source.lease(SPEC, timeout_s=30):
            raise ZeroDivisionError
    running = asyncio.Event()

    async def loop_forever() -> None:
        async with source.lease(SPEC, timeout_s=30) as sandbox:
            running.set()
            await sandbox.run_code("while True: pass", timeout_s=60)

    task = asyncio.create_task(loop_forever())
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await living(provider) == []
    async with source.lease(SPEC, timeout_s=30) as sandbox:
        assert (await sandbox.run_code("print(1)", timeout_s=10)).stdout == "1\n"
