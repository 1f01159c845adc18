"""Tools of an MCP server, through the agent's tool layer, against our own server with real sandboxes behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.sandbox import LocalConfig, SandboxConfig
from rayapp.core.errors import ConfigError, ToolUnavailableError
from rayapp.tools.base import ToolContext, ToolFailedError
from rayapp.tools.loading import open_tools
from rayapp.tools.toolset import ToolSet
from support.sandbox_service import mcp_serving

KEY = "the key of the test"
SANDBOXES = SandboxConfig(providers=(LocalConfig(max_sandboxes=3),))
# As in the seed's ConfigMap, comment in the JSON included.
SERVERS = """
{
  "mcpServers": {
    "Tavily Expert": {
      "url": "URL", # Replace with the Sandbox MCP Ingress endpoint.
      "api_key": "${MCP_KEY}" # If an API key is needed, you can add an NGINX container to the Ray cluster as a proxy.
    }
  }
}
"""
TOOLS = """
tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config:
      rate_limit: 120
      timeout: 120
      type: mcp
    mcp:
      mcp_servers_config_path: mcp_server.json
      tool_selected_list:
        - run_code_once
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem, must be a digits"
          required: ["answer"]
"""


@pytest.fixture
async def server_url() -> AsyncIterator[str]:
    async with mcp_serving(SANDBOXES, api_key=KEY) as url:
        yield url


def files(folder: Path, url: str, tools: str = TOOLS) -> Path:
    (folder / "mcp_server.json").write_text(SERVERS.replace("URL", url))
    path = folder / "gsm8k_mcp_tool_config.yaml"
    path.write_text(tools)
    return path


async def opened(folder: Path, url: str, tools: str = TOOLS, key: str = KEY) -> ToolSet:
    return await open_tools(files(folder, url, tools), ToolContext(environ={"MCP_KEY": key}))


async def run_once(tools: ToolSet, code: str) -> str:
    tool = tools.get("run_code_once")
    state = await tool.create({})
    output = await tool.execute(state, {"code": code})
    await tool.release(state)
    return output.text


async def test_files_of_the_seed_load_as_they_are_and_printed_text_comes_back_also_side_by_side(
    server_url: str, tmp_path: Path
) -> None:
    tools = await opened(tmp_path, server_url)
    schemas = {schema.name: schema for schema in tools.schemas}
    assert sorted(schemas) == ["calc_gsm8k_reward", "run_code_once"]
    assert schemas["run_code_once"].parameters["required"] == ["code"]
    assert "ctx" not in schemas["run_code_once"].parameters["properties"]
    assert await run_once(tools, "print(42)") == "42"
    assert await run_once(tools, "1 + 1") == "2"
    assert await run_once(tools, "x = 3\nprint(x)\nx * 'é漢'") == "3\n'é漢é漢é漢'"
    assert await run_once(tools, "") == ""
    failed = await run_once(tools, "print('before')\n[][1]")
    assert failed.startswith("before\nTraceback")
    assert failed.endswith("IndexError: list index out of range")
    texts = await asyncio.gather(*(run_once(tools, f"print({n} ** 2)") for n in range(30)))
    assert texts == [str(n * n) for n in range(30)]
    await tools.close()


async def test_code_that_runs_too_long_is_told_and_the_session_lives(tmp_path: Path) -> None:
    tools_yaml = TOOLS.replace("timeout: 120", "timeout: 2")
    async with mcp_serving(SANDBOXES, api_key=KEY) as url:
        tools = await opened(tmp_path, url, tools_yaml)
        with pytest.raises(ToolFailedError, match="did not finish within 2 s"):
            await run_once(tools, "while True: pass")

        assert await run_once(tools, "print('still here')") == "still here"
        await tools.close()


async def test_what_is_wrong_at_the_start_is_a_clear_error(server_url: str, tmp_path: Path) -> None:
    down = "http://127.0.0.1:9/mcp"
    with pytest.raises(ConfigError, match=r"'Tavily Expert' at http://127\.0\.0\.1:9/mcp .*rayapp sandbox serve"):
        await opened(tmp_path, down)
    with pytest.raises(ConfigError, match="401"):
        await opened(tmp_path, server_url, key="another key")
    with pytest.raises(ConfigError, match=r"names run_cod_once, .*run_code, run_code_once, run_command"):
        await opened(tmp_path, server_url, TOOLS.replace("- run_code_once", "- run_cod_once"))
    with pytest.raises(ConfigError, match="needs the environment variable MCP_KEY"):
        await open_tools(files(tmp_path, down), ToolContext(environ={}))


async def test_session_that_drops_is_opened_again(tmp_path: Path) -> None:
    async with mcp_serving(SANDBOXES, api_key=KEY) as url:
        port = int(url.split(":")[2].split("/")[0])
        tools = await opened(tmp_path, url)
        assert await run_once(tools, "print(1)") == "1"
    # The server is gone, and another one takes its address: it knows nothing of the old session.
    async with mcp_serving(SANDBOXES, api_key=KEY, port=port):
        assert await run_once(tools, "print(2)") == "2"
        await tools.close()


async def test_a_session_per_trajectory_keeps_names_apart_and_one_that_is_lost_with_them_is_not_replaced(
    tmp_path: Path,
) -> None:
    yaml = TOOLS.replace("type: mcp", "type: mcp\n      session: trajectory").replace("run_code_once", "run_code")
    async with mcp_serving(SANDBOXES, api_key=KEY) as url:
        port = int(url.split(":")[2].split("/")[0])
        tools = await opened(tmp_path, url, yaml)
        tool: Any = tools.get("run_code")
        states = [await tool.create({}) for _ in range(3)]
        await tool.execute(states[0], {"code": "x = 41"})
        assert (await tool.execute(states[0], {"code": "x + 1"})).text == "42"
        assert "NameError" in (await tool.execute(states[1], {"code": "x"})).text
    async with mcp_serving(SANDBOXES, api_key=KEY, port=port):
        with pytest.raises(ToolUnavailableError, match="this trajectory's MCP session and its state on the server"):
            await tool.execute(states[0], {"code": "print(x)"})
        # The third trajectory has nothing to lose yet.
        assert (await tool.execute(states[2], {"code": "print(2)"})).text == "2"
        for state in states:
            await tool.release(state)
        await tools.close()


async def test_server_that_stays_away_fails_each_call_after_backoff(tmp_path: Path) -> None:
    quick = TOOLS.replace("timeout: 120", "timeout: 120\n      reconnect_timeout: 0.5")
    async with mcp_serving(SANDBOXES, api_key=KEY) as url:
        tools = await opened(tmp_path, url, quick)
        await run_once(tools, "print(1)")

    answers = await asyncio.gather(*(run_once(tools, "print(2)") for _ in range(5)), return_exceptions=True)

    assert [type(answer) for answer in answers] == [ToolUnavailableError] * 5
    assert "could not be reached for 0.5 s" in str(answers[0])
    await tools.close()


async def test_rate_limit_holds_calls_back(server_url: str, tmp_path: Path) -> None:
    tools = await opened(tmp_path, server_url, TOOLS.replace("rate_limit: 120", "rate_limit: 4"))
    tool: Any = tools.get("run_code_once")
    state = await tool.create({})

    outputs = await asyncio.gather(*(tool.execute(state, {"code": "print(1)"}) for _ in range(8)))

    # Four start at once; each of the others waits for a token, a quarter of a second apart: the last one a second.
    assert max(output.waited_s for output in outputs) >= 0.9
    await tools.close()
