"""`rayapp sandbox run` with every provider: the real SDKs, services on loopback."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rayapp.cli.sandbox import app
from rayapp.core.errors import InputError, SandboxConfigError
from rayapp.sandbox.leases import RUN_LABEL
from support.providers import KEY_ENV, KEYS, section_of, stub_of
from support.stubs import mcp_stub

KINDS = pytest.mark.parametrize("kind", ["e2b", "daytona", "mcp"])


def invoke(*args: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["run", *args], input=stdin)


def write_config(folder: Path, **section: Any) -> str:
    path = folder / "config.yaml"
    path.write_text(json.dumps({"sandbox": {"providers": [section]}}))
    return str(path)


@pytest.fixture(name="code")
def _code(tmp_path: Path) -> str:
    path = tmp_path / "code.py"
    path.write_text("import sys\nprint(input()[::-1])\nprint('e', file=sys.stderr)\nsys.exit(3)")
    return str(path)


@KINDS
async def test_a_file_runs_at_a_provider_with_its_input_and_leaves_nothing(
    kind: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = stub_of(kind)
    monkeypatch.setenv(KEY_ENV, KEYS[kind])
    async with stub.running() as url:
        config = write_config(tmp_path, **section_of(kind, url))
        done = await asyncio.to_thread(invoke, code, "--provider", kind, "--config", config, "--stdin", stdin="abc")

        assert (done.stdout, done.stderr, done.exit_code) == ("cba\n", "e\n", 3), done
        # A sandbox of an MCP server ends with its session.
        assert stub.num_sessions == 0 if isinstance(stub, mcp_stub.McpStub) else not stub.boxes.living
        if not isinstance(stub, mcp_stub.McpStub):
            labels = stub.bodies[0].get("metadata") or stub.bodies[0]["labels"]
            assert labels[RUN_LABEL] == "sandbox-run", "what a killed command leaves is found by `reap`"


@KINDS
async def test_code_that_runs_past_its_time_is_stopped_and_says_so(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEYS[kind])
    endless = tmp_path / "endless.py"
    endless.write_text("while True: pass")
    async with stub_of(kind).running() as url:
        config = write_config(tmp_path, **section_of(kind, url))
        done = await asyncio.to_thread(
            invoke, str(endless), "--provider", kind, "--config", config, "--timeout-s", "0.5"
        )
    assert done.exit_code == 124, done
    assert "stopped for timeout" in done.stderr


async def test_an_mcp_server_is_named_by_its_url(code: str) -> None:
    error = invoke(code, "--provider", "mcp").exception
    assert isinstance(error, SandboxConfigError)
    assert "--url" in str(error)
    stub = mcp_stub.McpStub()
    async with stub.running() as url:
        # Without a key this server refuses: the call has reached it, and nothing else is missing.
        refused = await asyncio.to_thread(invoke, code, "--provider", "mcp", "--url", url)
    assert isinstance(refused.exception, SandboxConfigError)
    assert "status 401" in str(refused.exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--provider", "e2b", "--level", "ns"], "--level"),
        (["--provider", "daytona", "--package", "numpy"], "--package"),
        (["--provider", "local", "--url", "http://x"], "--url"),
    ],
)
def test_an_option_that_a_provider_has_no_use_for_is_refused(code: str, options: list[str], said: str) -> None:
    error = invoke(code, *options).exception
    assert isinstance(error, InputError)
    assert said in str(error)
