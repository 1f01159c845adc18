"""What goes wrong between us and an MCP server, through the real SDK: one of our errors, in time, no session left."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rayapp.config.sandbox import McpConfig
from rayapp.core.errors import SandboxConfigError, SandboxDeadlineError, SandboxError, SandboxGoneError
from rayapp.core.types import ExecOutcome, SandboxSpec
from rayapp.extras.providers.mcp import McpChannel, McpProvider
from rayapp.tools.mcp_session import McpSession
from support.stubs.faults import Faults
from support.stubs.mcp_stub import API_KEY, McpStub

SPEC = SandboxSpec()


@asynccontextmanager
async def opened(spec: dict[str, object] | None = None) -> AsyncIterator[tuple[McpProvider, McpStub]]:
    stub = McpStub(Faults(hang_s=1.5))
    async with stub.running() as url:
        provider = McpProvider(McpConfig.model_validate({"url": url, **(spec or {})}), api_key=API_KEY)
        try:
            yield provider, stub
        finally:
            await provider.close()
            assert [found async for found in provider.list({})] == []


@pytest.mark.parametrize("is_stateful", [False, True], ids=["fresh", "session"])
@pytest.mark.parametrize("fault", ["429", "500", "502", "503", "hang", "garbage", "cut", "lost-session"])
async def test_a_run_that_the_way_breaks_is_no_verdict(fault: str, is_stateful: bool) -> None:
    async with opened() as (provider, stub):
        sandbox = await provider.create(SPEC, labels={}, ttl_s=300, timeout_s=60)
        stub.faults.next("post", fault)
        try:
            result = await sandbox.run_code("print('honest')", timeout_s=20, stateful=is_stateful)
        except SandboxConfigError as error:
            pytest.fail(f"the service failed and the configuration was blamed: {error}")
        except SandboxError:
            pass
        else:
            assert (result.outcome, result.stdout) == (ExecOutcome.OK, "honest\n"), result
        assert stub.faults.injected[f"post:{fault}"] == 1


@pytest.mark.parametrize("fault", ["500", "hang", "slow"])
async def test_a_tool_that_fails_is_no_verdict(fault: str) -> None:
    async with opened() as (provider, stub):
        sandbox = await provider.create(SPEC, labels={}, ttl_s=300, timeout_s=60)
        stub.faults.next("run_command", fault)
        if fault == "500":
            with pytest.raises(SandboxError, match="injected"):
                await sandbox.run_code("print('honest')", timeout_s=20)
        else:
            assert (await sandbox.run_code("print('honest')", timeout_s=20)).stdout == "honest\n"


async def test_a_sandbox_that_dies_while_code_runs_is_gone() -> None:
    async with opened() as (provider, stub):
        sandbox = await provider.create(SPEC, labels={}, ttl_s=300, timeout_s=60)
        await sandbox.run_code("print(1)", timeout_s=20)
        stub.faults.next("run_command", "die")
        with pytest.raises(SandboxGoneError):
            await sandbox.run_code("print('honest')", timeout_s=20)
        assert not await sandbox.alive()


async def test_a_call_without_an_answer_ends_at_our_own_deadline() -> None:
    async with opened() as (provider, stub):
        sandbox = await provider.create(SPEC, labels={}, ttl_s=300, timeout_s=60)
        stub.faults.hang_s = 600.0  # longer than a test may take
        stub.faults.next("run_command", "hang")
        with pytest.raises(SandboxDeadlineError):
            await sandbox.read_file("a", timeout_s=0.5)


async def test_a_call_that_the_server_leaves_unanswered_is_no_wrong_key() -> None:
    """-32001 is the SDK's code for no answer in time, and the servers' for a key that they refuse."""
    stub = McpStub(Faults(hang_s=5.0))
    stub.faults.next("run_command", "hang")
    async with stub.running() as url:
        session = McpSession(url, {"E2B-API-KEY": API_KEY})
        await session.open(timeout_s=10)
        channel = McpChannel("mcp-1", session, McpConfig(url=url), SPEC, time.monotonic() + 300, lambda _: None)
        with pytest.raises(SandboxDeadlineError):
            await channel.run_python("print(1)", timeout_s=0.2, max_chars=100)
        await channel.kill(timeout_s=5)


async def test_what_code_prints_up_to_its_limit_comes_back_whole() -> None:
    """The SDK ends answers of over a mebibyte unless it is told the size of ours."""
    async with opened() as (provider, _):
        sandbox = await provider.create(SPEC, labels={}, ttl_s=300, timeout_s=60)
        result = await sandbox.run_code("print('x' * 1_500_000)", timeout_s=20, max_output_bytes=2_000_000)
        assert (result.outcome, len(result.stdout)) == (ExecOutcome.OK, 1_500_001)


async def test_a_server_that_is_not_there_and_one_that_speaks_no_mcp_are_named() -> None:
    from support.stubs.e2b_stub import E2BStub

    nowhere = McpProvider(McpConfig(url="http://127.0.0.1:9/mcp"), api_key="k")
    with pytest.raises(SandboxError, match=r"127\.0\.0\.1:9"):
        await nowhere.create(SPEC, labels={}, ttl_s=300, timeout_s=5)
    async with E2BStub().running() as url:
        other = McpProvider(McpConfig(url=f"{url}/mcp"), api_key="k")
        with pytest.raises(SandboxError, match="mcp"):
            await other.create(SPEC, labels={}, ttl_s=300, timeout_s=5)


async def test_a_wrong_key_is_the_configurations_fault() -> None:
    async with McpStub().running() as url:
        provider = McpProvider(McpConfig(url=url), api_key="wrong")
        with pytest.raises(SandboxConfigError, match="api_key_env"):
            await provider.create(SPEC, labels={}, ttl_s=300, timeout_s=5)


async def test_the_tools_get_the_arguments_that_their_servers_name() -> None:
    """run_command {cmd}, run_code {code, language}: PR 165 of OpenKruise's sandbox-manager."""
    async with opened() as (provider, stub):
        sandbox = await provider.create(SandboxSpec(env=(("MODE", "x"),)), labels={}, ttl_s=300, timeout_s=60)
        await sandbox.run_code("print(1)", timeout_s=20)
        seen = await sandbox.run_code("import os; print(os.environ['MODE'])", timeout_s=20, stateful=True)
        assert seen.stdout == "x\n", "the spec's environment reaches stateful code as well"
    kinds = {tool: frozenset(arguments) for tool, arguments in stub.calls}
    assert kinds == {"run_command": {"cmd"}, "run_code": {"code", "language"}}
    assert {headers["x-template"] for headers in stub.headers} == {"code-interpreter"}
    assert {headers["x-sandbox-ttl"] for headers in stub.headers} == {"300"}
