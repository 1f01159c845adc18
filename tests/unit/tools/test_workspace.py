"""The sandbox that a trajectory's tools share, with a provider that runs no code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import SandboxConfigError, SandboxGoneError, SandboxProtocolError
from rayapp.core.protocols import Sandbox, SandboxSource
from rayapp.core.types import SandboxSpec
from rayapp.extras.repositories.task import changed_files
from rayapp.rollout.recorder import AgentPrompt
from rayapp.sandbox.pool.build import open_pool
from rayapp.tools.base import ToolContext, ToolFailedError
from rayapp.tools.coding import BashTool
from rayapp.tools.workspace import Workspace, open_workspace
from support.fake_sandboxes import FakeProvider


@asynccontextmanager
async def workspace_of(provider: FakeProvider, **files: str) -> AsyncIterator[Workspace]:
    """Yield a workspace; at most one sandbox is leased, and it is returned at the end."""
    async with open_pool(SandboxConfig(max_leases=1), "test-workspace", local=provider) as (sandboxes, pool):
        workspace = Workspace(sandboxes, SandboxSpec(), lease_timeout_s=5.0, files=files)
        yield workspace
        await workspace.close()
        assert pool.stats()["sandbox/leased"] == 0


async def look(sandbox: Sandbox) -> str:
    return (await sandbox.read_file("a")).decode()


async def test_no_sandbox_is_leased_before_one_is_needed() -> None:
    provider = FakeProvider()
    async with workspace_of(provider, a="text") as workspace:
        assert not provider.created
        assert [(await workspace.use(look)).value for _ in range(2)] == ["text", "text"]
        assert len(provider.created) == 1


async def test_a_call_cut_off_while_the_files_are_written_keeps_no_second_sandbox() -> None:
    provider = FakeProvider()
    provider.hang_next("write_file")
    async with workspace_of(provider, a="text") as workspace:
        cut_off = asyncio.create_task(workspace.use(look))
        while not provider.calls["write_file"]:
            await asyncio.sleep(0)
        cut_off.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut_off
        assert not provider.living
        assert (await workspace.use(look)).value == "text"


async def test_what_is_lost_stays_lost() -> None:
    provider = FakeProvider()
    async with workspace_of(provider, a="text") as workspace:
        await workspace.use(look)
        provider.lose(provider.created[0])
        for said in ("is gone", "workspace has ended"):
            with pytest.raises(SandboxGoneError, match=said):
                await workspace.use(look)
        assert len(provider.created) == 1


@pytest.mark.parametrize(
    ("asked", "memory_mib"),
    [(AgentPrompt(token_ids=()).spec, 256), (SandboxSpec(memory_mib=128), 256), (SandboxSpec(memory_mib=512), 512)],
)
async def test_the_tools_say_how_much_memory_there_is_where_the_task_asks_for_no_more(
    asked: SandboxSpec | None, memory_mib: int
) -> None:
    provider = FakeProvider()
    async with open_pool(SandboxConfig(max_leases=1), "test-workspace", local=provider) as (sandboxes, _):
        tool = BashTool({"memory_mib": 256}, None, ToolContext(sandboxes=sandboxes))
        assert open_workspace([tool], spec=asked).spec.memory_mib == memory_mib


@pytest.mark.usefixtures("namespaces")
@pytest.mark.asyncio(loop_scope="module")
async def test_an_agent_that_removes_programs_loses_its_own_work_and_does_not_end_the_run(
    sandboxes: SandboxSource,
) -> None:
    tool = BashTool({}, None, ToolContext(sandboxes=sandboxes))
    workspace = open_workspace([tool], spec=SandboxSpec(own_files=True, env=(("PATH", "/nowhere"),)))
    with pytest.raises(SandboxConfigError, match="bash is not installed"):
        await tool.execute(workspace, {"command": "ls"})
    with pytest.raises(SandboxProtocolError, match="lacks git"):
        await workspace.use(lambda sandbox: changed_files(sandbox, {}, by_git=True))
    await workspace.use(lambda sandbox: sandbox.write_file("a", b""))
    with pytest.raises(ToolFailedError, match="there is no bash"):
        await tool.execute(workspace, {"command": "ls"})
    await workspace.close()
