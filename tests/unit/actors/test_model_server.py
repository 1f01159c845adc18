"""A model server restarts at its address, is noticed when it dies, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import psutil
import pytest

from actors.model_server import ModelServer, vllm_serve
from rayapp.config.config import Config, with_values
from rayapp.config.other_models import ModelServerSection
from rayapp.core.errors import ConfigError, EngineDeadError
from rayapp.core.http import KEY_VARIABLE, KeyGuard

SERVER = """
import http.server, os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
USAGE = "import sys; print('api_server: error: unrecognized arguments: --max-modle-len', file=sys.stderr); exit(2)"
FAILING = "print('(EngineCore pid=7) ERROR 11-22 14:06:22 [core.py:1] ValueError: no such model', flush=True); exit(3)"
SECTION = ModelServerSection(name="judge", path="models/judge", options={"max_model_len": 512, "enforce-eager": True})


def program(text: str) -> Any:
    def command(section: ModelServerSection, model: str, host: str, port: int) -> Sequence[str]:
        return [sys.executable, "-c", text, host, str(port)]

    return command


@pytest.fixture
async def server(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelServer]:
    monkeypatch.setattr("actors.model_server.POLL_S", 0.05)
    section = SECTION.model_copy(update={"path": str(tmp_path)})
    server = ModelServer(Config(), section, "k", program(SERVER))
    yield server
    await server.close()


def the_supervisor() -> psutil.Process:
    running = (each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE)
    return next(each for each in running if "supervisor.py" in " ".join(each.cmdline()))


async def test_a_server_that_died_is_missed_and_answers_where_it_did_when_it_is_started_again(
    server: ModelServer,
) -> None:
    address = await server.start()
    assert await server.ping()
    supervisor = the_supervisor()
    (program,) = supervisor.children()
    os.kill(program.pid, signal.SIGKILL)
    while supervisor.status() != psutil.STATUS_ZOMBIE:  # waited for by the server, which reads how it ended
        await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError, match=r"model-server-judge .* ended with status -9"):
        await server.ping()

    assert await server.start(address) == address

    assert await server.ping()


async def test_its_cache_is_of_whole_gib_where_a_server_of_the_policy_takes_a_part(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    server._config = with_values(server._config, server={"kv_cache_gib": 1.1})
    await server.start()
    (program,) = the_supervisor().children()

    assert program.environ()["VLLM_CPU_KVCACHE_SPACE"] == "2"


async def test_all_that_a_server_started_ends_with_it(server: ModelServer) -> None:
    await server.start()
    running = [the_supervisor(), *the_supervisor().children(recursive=True)]
    assert len(running) == 3  # with the server, and what that has started

    await server.close()
    await server.close()

    assert psutil.wait_procs(running, timeout=60)[1] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (FAILING, "ended with status 3, because ValueError: no such model."),
        (USAGE, "ended with status 2, because api_server: error: unrecognized arguments: --max-modle-len."),
    ],
)
async def test_a_server_that_does_not_start_says_why(
    text: str, reason: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("actors.model_server.POLL_S", 0.05)
    server = ModelServer(Config(), SECTION.model_copy(update={"path": str(tmp_path)}), "k", program(text))

    with pytest.raises(EngineDeadError, match=re.escape(reason)):
        await server.start()


def test_options_are_those_of_vllm_serve() -> None:
    command = vllm_serve(SECTION, "/models/judge", "10.0.0.1", 8001)

    assert command[2:5] == ["vllm.entrypoints.openai.api_server", "--model", "/models/judge"]
    assert " ".join(command[5:]) == (
        "--host 10.0.0.1 --port 8001 --served-model-name judge --tensor-parallel-size 1 --gpu-memory-utilization 0.9 "
        "--middleware rayapp.core.http.KeyGuard --max-model-len 512 --enforce-eager"
    )


async def test_a_model_server_is_started_with_a_guard_that_refuses_every_path_without_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = vllm_serve(ModelServerSection(name="m", path="m"), "m", "127.0.0.1", 1)
    assert command[command.index("--middleware") + 1] == f"{KeyGuard.__module__}.KeyGuard"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    with pytest.raises(ConfigError, match="key"):
        KeyGuard(app)
    monkeypatch.setenv(KEY_VARIABLE, "k")
    transport = httpx.ASGITransport(app=KeyGuard(app))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/health")).status_code == 200
        for right in ({"Authorization": "Bearer k"}, {"x-api-key": "k"}):
            assert (await client.post("/classify", headers=right)).status_code == 200
        for wrong in ({}, {"Authorization": "Bearer Kk"}, {"x-api-key": "wrong"}):
            for path in ("/v1/completions", "/classify", "/tokenize", "/invocations", "/health/", "//health"):
                assert (await client.post(path, headers=wrong)).status_code in (401, 403), (path, wrong)
