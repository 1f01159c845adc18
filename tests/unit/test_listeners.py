"""Everything of the product that listens: each listener has a test that refuses calls without a key, or a reason."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.model_server import vllm_serve
from rayapp.config.other_models import ModelServerSection
from rayapp.core.errors import ConfigError
from rayapp.core.http import KEY_VARIABLE, KeyGuard

ROOT = Path(__file__).parents[2]
LISTENING_CALLS = {
    *("listen", "bind", "bound", "create_server", "start_server", "start_unix_server", "run_app", "free_address"),
    *("Server", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "TCPSite", "SockSite", "TCPStore", "Listening"),
}
"""Names of functions and classes; a call of one of them listens, or prepares to."""
TRIED = {
    "actors/model_server.py": "tests/unit/test_listeners.py",
    "rayapp/extras/view/command.py": "tests/unit/extras/view/test_view_server.py",
    "rayapp/rollout/gateway/listening.py": "tests/unit/rollout/gateway/test_server.py",
    "rayapp/rollout/gateway/server.py": "tests/unit/rollout/gateway/test_server.py",
    "rayapp/extras/service/app.py": "tests/contracts/test_mcp_server.py",
}
"""File -> the test that calls its server without the key."""
WITHOUT_A_KEY = {
    "actors/learner.py": "finds a free port, for learner/distributed.py",
    "actors/own_ray.py": "finds a free port for Ray's dashboard; listens to nothing",
    "actors/learner_group.py": "finds a free port, for engine/weights/",
    "actors/spawn.py": "finds a free port; listens to nothing",
    "rayapp/core/http.py": "listens for its callers: `view` and the sandbox service",
    "rayapp/cli/machine.py": "tries whether a port is free",
    "rayapp/learner/distributed.py": "torch's store has no key: the chart's NetworkPolicy keeps other pods away",
    "rayapp/sandbox/local/doctor.py": "listens while it tries whether a sandbox can reach it",
    "rayapp/sandbox/local/levels/loopback.py": "inside a sandbox: leads to the gateway, which asks for the key",
    "rayapp/sandbox/local/levels/namespaces.py": "inside a sandbox: leads to the gateway, which asks for the key",
    "rayapp/extras/providers/relay_program.py": "inside a sandbox: leads to the gateway, which asks for the key",
}


def listens(path: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(getattr(each, "attr", getattr(each, "id", "")) in LISTENING_CALLS for each in calls)


def test_every_listener_of_the_product_is_tried_without_its_key_or_has_a_reason() -> None:
    files = [path for room in ("rayapp", "actors") for path in (ROOT / room).rglob("*.py")]

    found = {str(path.relative_to(ROOT)) for path in files if "library" not in path.parts and listens(path)}

    assert found == TRIED.keys() | WITHOUT_A_KEY.keys()
    for test in TRIED.values():
        assert "40" in (ROOT / test).read_text(), f"{test} refuses nobody"


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
