"""`rayapp sandbox serve` as its clients see it: keys, headers, sessions, and this application's own MCP provider."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from rayapp.config.sandbox import LocalConfig, McpConfig, SandboxConfig
from rayapp.core.types import Prompt, SandboxSpec
from rayapp.extras.providers.mcp import McpProvider
from rayapp.extras.repositories.scripts import TestScript
from rayapp.extras.repositories.task import as_answer
from rayapp.extras.service.mcp_tools import with_last_value
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.loading import load_task
from support.sandbox_service import mcp_serving

KEY = "the key of the test"
SANDBOXES = SandboxConfig(providers=(LocalConfig(max_sandboxes=2),))


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with mcp_serving(SANDBOXES, api_key=KEY, lease_timeout_s=60.0) as address:
        yield address


@asynccontextmanager
async def client(url: str, **headers: str) -> AsyncIterator[Client]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    http = httpx2.AsyncClient(headers={"E2B-API-KEY": KEY, **named}, timeout=60)
    async with http, Client(streamable_http_client(url, http_client=http), mode="legacy") as connected:
        yield connected


async def health(url: str) -> dict[str, Any]:
    async with httpx2.AsyncClient() as http:
        answer = await http.get(url.replace("/mcp", "/health"))
        found: dict[str, Any] = answer.json()
        return found


async def test_requests_without_the_key_are_refused_and_health_is_open(url: str) -> None:
    async with httpx2.AsyncClient() as http:
        bare = await http.post(url, json={})
        bearer = await http.post(url, json={}, headers={"Authorization": f"Bearer {KEY}"})

    assert bare.status_code == 401
    assert bearer.status_code != 401
    assert (await health(url))["status"] == "ok"


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


SPELLINGS = (
    "/mcp", "/mcp%0A", "/mcp%0a", "/mcp/", "//mcp", "/mcp%2F", "/%6dcp", "/mcp?x=/health", "/./mcp", "/health/../mcp",
    "/mcp%00", "/MCP", "/nothing", "/health%0A", "/health/", "//health",
)  # fmt: skip
METHODS = ("POST", "GET", "HEAD", "OPTIONS", "DELETE", "PUT", "TRACE")


async def test_no_spelling_of_a_path_goes_without_the_key(url: str) -> None:
    asked = [(method, path) for method in METHODS for path in SPELLINGS]
    answered = [await status_of(url, method, path, INITIALIZE) for method, path in asked]

    assert {each: status for each, status in zip(asked, answered, strict=True) if status != 401} == {}


async def test_only_a_get_of_health_goes_without_the_key(url: str) -> None:
    answered = {method: await status_of(url, method, "/health") for method in METHODS}

    assert answered == {method: 200 if method == "GET" else 401 for method in METHODS}


async def status_of(url: str, method: str, target: str, body: object = None, **headers: str) -> int:
    """One request without a key whose target goes out as it is: clients would put some of them right."""
    host, port = url.split("/")[2].split(":")
    content = b"" if body is None else json.dumps(body).encode()
    fields = {"Host": f"{host}:{port}", "Content-Type": "application/json", "Content-Length": str(len(content)),
              "Accept": "application/json, text/event-stream", "Connection": "close", **headers}  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + content)
    async with asyncio.timeout(60):
        first = await reader.readline()
    writer.close()
    return int(first.split()[1])


async def test_tools_have_openkruises_names_and_arguments(url: str) -> None:
    async with client(url) as connected:
        tools = {tool.name: tool.input_schema["properties"] for tool in (await connected.list_tools()).tools}

    assert {name: sorted(arguments) for name, arguments in tools.items()} == {
        "run_code": ["code", "language"],
        "run_code_once": ["code", "language"],
        "run_command": ["cmd", "cwd", "envs"],
    }


async def test_answers_have_openkruises_form(url: str) -> None:
    async with client(url) as connected:
        code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7"
        good = (await connected.call_tool("run_code_once", {"code": code})).structured_content
        bad = (await connected.call_tool("run_code_once", {"code": "int('x')"})).structured_content
        command = {"cmd": "echo $WHO; exit 3", "envs": {"WHO": "it's me"}}
        ran = (await connected.call_tool("run_command", command)).structured_content
    assert good["logs"] == {"stdout": ["out\n"], "stderr": ["err\n"]}
    assert good["results"] == [{"text": "42", "is_main_result": True}]
    assert "error" not in good
    assert (bad["error"]["name"], bad["logs"]["stderr"]) == ("ValueError", [])
    assert bad["error"]["traceback"].startswith("Traceback")
    assert (ran["stdout"], ran["exit_code"]) == ("it's me\n", 3)


async def test_session_keeps_its_sandbox_and_gives_it_back_at_its_end(url: str) -> None:
    async with client(url) as connected:
        await connected.call_tool("run_code", {"code": "x = 5"})
        second = (await connected.call_tool("run_code", {"code": "x"})).structured_content
        assert (second["results"][0]["text"], second["execution_count"]) == ("5", 2)
        assert (await health(url))["sessions"] == 1

    assert (await health(url))["sessions"] == 0


async def test_sandbox_of_a_session_ends_with_its_time_to_live(url: str) -> None:
    async with client(url, X_Sandbox_TTL="0.3") as connected:
        await connected.call_tool("run_code", {"code": "x = 5"})
        async with asyncio.timeout(60):
            while (await health(url))["sessions"]:
                await asyncio.sleep(0.05)
        answer = await connected.call_tool("run_code", {"code": "x"})

    assert answer.is_error
    assert "not found" in answer.content[0].text  # type: ignore[union-attr]


async def test_execution_timeout_of_the_header_is_kept(url: str) -> None:
    async with client(url, X_Execution_Timeout="0.5") as connected:
        with pytest.raises(MCPError, match=r"timed out after 0\.5 s; the end of its output: so far") as caught:
            await connected.call_tool("run_code_once", {"code": "print('so far', flush=True)\nwhile True: pass"})

    assert caught.value.code == -32005


async def test_no_free_sandbox_is_an_error_of_the_protocol() -> None:
    async with (
        mcp_serving(SANDBOXES, api_key=KEY, lease_timeout_s=10.0) as url,
        client(url) as first,
        client(url) as second,
        client(url) as third,
    ):
        await first.call_tool("run_code", {"code": "1"})
        await second.call_tool("run_code", {"code": "1"})
        with pytest.raises(MCPError, match="no sandbox is available") as caught:
            await third.call_tool("run_code_once", {"code": "1"})

    assert caught.value.code in (-32002, -32005)


@pytest.mark.parametrize(
    ("tool", "arguments", "headers", "message"),
    [
        ("run_code_once", {"code": "1", "language": "javascript"}, {}, "language 'javascript' is not supported"),
        ("run_code_once", {"code": "1"}, {"X_Execution_Timeout": "soon"}, "x-execution-timeout must be a number"),
        ("run_command", {"cmd": "true", "envs": {"A B": "x"}}, {}, "'A B' is not a valid name"),
    ],
)
async def test_wrong_requests_are_told_to_the_caller(
    url: str, tool: str, arguments: dict[str, Any], headers: dict[str, str], message: str
) -> None:
    async with client(url, **headers) as connected:
        answer = await connected.call_tool(tool, arguments)

    assert answer.is_error
    assert message in answer.content[0].text  # type: ignore[union-attr]


@pytest.fixture
async def processes(url: str) -> None:
    """Skip where the server's sandboxes start no processes: a remote sandbox needs one that watches the code."""
    async with client(url) as connected:
        forked = (await connected.call_tool("run_command", {"cmd": "(exit 0) && echo forked"})).structured_content
    if "forked" not in str(forked):
        pytest.skip("this node's sandboxes are of level ll, which starts no processes")


@pytest.mark.usefixtures("processes")
async def test_our_own_mcp_provider_works_on_our_own_server(url: str) -> None:
    provider = McpProvider(McpConfig(url=url), api_key=KEY)
    sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=60, timeout_s=30)

    once = await sandbox.run_code("print(6 * 7)", timeout_s=20)
    report = await sandbox.call_function("def f(x): return x + 1", "f", [(1,), (2,)], timeout_s=20)
    await sandbox.run_code("y = 'kept'", timeout_s=20, stateful=True)
    kept = await sandbox.run_code("print(y)", timeout_s=20, stateful=True)
    await provider.close()

    assert once.stdout == "42\n", once
    assert [call.value for call in report.calls] == [2, 3]
    assert kept.stdout == "kept\n"


@pytest.mark.parametrize(
    "code", ["", "x = 1", "for x in range(3): x", "def f(:", "1 +", "(" * 300, "-" * 5000 + "1", "\x00"]
)
def test_code_without_a_last_expression_is_left_as_it_is(code: str) -> None:
    assert with_last_value(code) == (code, "")


async def test_command_serves_until_it_is_told_to_stop() -> None:
    command = [sys.executable, "-m", "rayapp", "sandbox", "serve", "--port", "0"]
    environment = {**os.environ, "RAYAPP_SANDBOX_API_KEY": KEY}
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=root, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(120):
            first = (await process.stdout.readline()).decode()
            async with client(first.split()[2] + "/mcp") as connected:
                answer = (await connected.call_tool("run_code_once", {"code": "print('hi')"})).structured_content
            process.send_signal(signal.SIGTERM)
            rest = (await process.stdout.read()).decode()
            status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    assert answer["logs"]["stdout"] == ["hi\n"]
    assert status == 0
    assert rest.endswith("stopped; every sandbox is ended\n")


@pytest.mark.usefixtures("processes")
async def test_a_trusted_test_script_judges_in_a_remote_sandbox_at_harbors_paths(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_KEY", KEY)
    script = b"#!/bin/sh\ngrep -q right a.txt /app/a.txt; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    task = load_task("fix_median")
    trusted = TestScript(files={"test.sh": script}, env=(), image="")
    task = replace(task, folder=replace(task.folder, tests=(), script=trusted, workdir="/app"))
    prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))
    remote = McpConfig(url=url, api_key_env="MCP_KEY", max_sandboxes=2)

    async with open_pool(SandboxConfig(providers=(remote,)), "harbor-over-mcp") as (source, _):
        rewards = [await task.score(prompt, as_answer({"a.txt": text}), source, seed=0) for text in ("right", "wrong")]

    assert [(reward.valid, reward.value) for reward in rewards] == [(True, 1.0), (True, 0.0)], rewards
