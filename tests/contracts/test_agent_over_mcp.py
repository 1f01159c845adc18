"""Whole plays with tools of a real MCP server, which may die under them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayapp.config.sandbox import LocalConfig, SandboxConfig
from rayapp.core.types import RequestId, Reward, RolloutStatus, SamplingParams, Trajectory
from rayapp.rollout.group import with_terms
from rayapp.rollout.recorder import AgentPrompt
from rayapp.tools.loading import open_tools
from rayapp.tools.toolset import ToolSet
from support import make
from support.hermes import call
from support.sandbox_service import mcp_serving

SANDBOXES = SandboxConfig(providers=(LocalConfig(max_sandboxes=2),))
MESSAGES = ({"role": "user", "content": "6 * 7?"},)
KWARGS = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}}


TURNS = (
    "I compute." + call("run_code_once", code="print('é漢', 6 * 7)"),
    call("calc_gsm8k_reward", answer="41") + call("calc_gsm8k_reward", answer="42"),
    "#### 42",
)


async def tool_set(folder: Path, url: str) -> ToolSet:
    servers = {"mcpServers": {"own": {"url": url, "headers": {"E2B-API-KEY": "key"}}}}
    (folder / "servers.json").write_text(json.dumps(servers))
    mcp = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"type": "mcp", "timeout": 30, "reconnect_timeout": 0.5},
        "mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["run_code_once"]},
    }
    gsm8k = {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {"type": "native"}}
    (folder / "tools.yaml").write_text(json.dumps({"tools": [mcp, gsm8k]}))
    return await open_tools(folder / "tools.yaml")


async def play(tokenizer: Any, tools: ToolSet, turns: Sequence[str]) -> Trajectory:
    loop = make.agent_loop(tokenizer, tools, max_response_tokens=4000)
    engine = make.engine(tokenizer, lambda request_id, prompt_ids: turns[request_id.turn])
    prompt = AgentPrompt(token_ids=tuple(loop.chat.prompt_ids(MESSAGES)), tools_kwargs=KWARGS)
    sampling = SamplingParams(max_tokens=900)
    found: Trajectory = await loop.run(prompt, engine=engine, sampling=sampling, request_id=RequestId("group", 0))
    return found


async def test_episode_of_the_seeds_job_from_question_to_trajectory(chat_tokenizer: Any, tmp_path: Path) -> None:
    async with mcp_serving(SANDBOXES, api_key="key") as url:
        tools = await tool_set(tmp_path, url)
        played = await play(chat_tokenizer, tools, TURNS)
        await tools.close()

    trajectory = replace(played, reward=with_terms(Reward(value=1.0, terms={"answer": 1.0}), played))
    assert [record.output for record in played.calls] == [
        "é漢 42",
        "Current parsed answer='41' reward=0.0",
        "Current parsed answer='42' reward=1.0",
    ]
    # Wrong costs 0.05, right adds nothing.
    assert trajectory.reward.terms["tool/step_reward"] == -0.05
    assert trajectory.reward.terms["tool/reward/calc_gsm8k_reward"] == 1.0
    assert (trajectory.num_turns, trajectory.status, trajectory.is_trainable) == (3, RolloutStatus.COMPLETED, True)


async def test_server_that_dies_fails_the_trajectories_that_need_it_and_no_other(
    chat_tokenizer: Any, tmp_path: Path
) -> None:
    async with mcp_serving(SANDBOXES, api_key="key") as url:
        tools = await tool_set(tmp_path, url)
        assert (await play(chat_tokenizer, tools, TURNS)).status is RolloutStatus.COMPLETED

    needy, other = TURNS, (call("calc_gsm8k_reward", answer="42"), "#### 42")
    plays = await asyncio.gather(*(play(chat_tokenizer, tools, turns) for turns in (needy, other, needy)))
    await tools.close()

    statuses = [played.status for played in plays]
    assert statuses == [RolloutStatus.ERROR_TOOL, RolloutStatus.COMPLETED, RolloutStatus.ERROR_TOOL]
    failed = plays[0]
    assert (failed.reward.failure_kind, failed.is_trainable) == ("tool_unavailable", False)
    assert "could not be reached for 0.5 s" in failed.reward.detail
