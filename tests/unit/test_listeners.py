"""Everything of the product that listens: servers refuse every call without their key, and each other listener has a
reason to have none."""

from __future__ import annotations

import ast
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Mount, Route

from actors.model_server import vllm_serve
from rayapp.config.other_models import ModelServerSection
from rayapp.config.sandbox import LocalConfig, SandboxConfig
from rayapp.core.errors import ConfigError
from rayapp.core.http import KEY_VARIABLE, KeyGuard, listen
from rayapp.core.types import RequestId, SamplingParams
from rayapp.extras.service.fusion import fusion_routes
from rayapp.rollout.agent.chat import load_template
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.listening import bound
from rayapp.rollout.gateway.open_server import OpenDoor, open_application, open_to_all
from rayapp.rollout.gateway.server import Api, Gateway
from rayapp.rollout.gateway.session import SessionLimits
from rayapp.runs.view.server import make_app
from rayapp.sandbox.service.app import _application, serving
from rayapp.sandbox.service.mcp_tools import ServerLimits
from rayapp.testing.engine import ScriptedEngine
from support.hermes import HermesParser

ROOT = Path(__file__).parents[2]
LISTENING_CALLS = {
    *("listen", "bind", "bound", "create_server", "start_server", "start_unix_server", "run_app", "free_address"),
    *("Server", "HTTPServer", "ThreadingHTTPServer", "TCPServer", "TCPSite", "SockSite", "TCPStore", "Listening"),
}
"""Names of functions and classes; a call of one of them listens, or prepares to."""
LISTENERS = {
    "actors/model_server.py": "model server",
    "rayapp/cli/serve.py": "serve",
    "rayapp/cli/view.py": "view",
    "rayapp/rollout/gateway/listening.py": "gateway",
    "rayapp/rollout/gateway/open_server.py": "serve",
    "rayapp/rollout/gateway/server.py": "gateway",
    "rayapp/sandbox/service/app.py": "sandbox service",
}
"""File -> server of `SERVERS`, whose calls need a key."""
WITHOUT_A_KEY = {
    "actors/learner.py": "finds a free port, for learner/distributed.py",
    "actors/learner_group.py": "finds a free port, for engine/weights/",
    "actors/spawn.py": "finds a free port; listens to nothing",
    "rayapp/core/http.py": "listens for its callers: `view` and the sandbox service",
    "rayapp/cli/doctor.py": "tries whether a port is free",
    "rayapp/learner/distributed.py": "torch's store has no key: the chart's NetworkPolicy keeps other pods away",
    "rayapp/sandbox/local/doctor.py": "listens while it tries whether a sandbox can reach it",
    "rayapp/sandbox/local/levels/loopback.py": "inside a sandbox: leads to the gateway, which asks for the key",
    "rayapp/sandbox/local/levels/namespaces.py": "inside a sandbox: leads to the gateway, which asks for the key",
    "rayapp/sandbox/providers/relay_program.py": "inside a sandbox: leads to the gateway, which asks for the key",
}
OPEN = {"/health", "/metrics"}
"""Paths that monitoring reads without a key: numbers, but no text and no tokens."""


def listens(path: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(getattr(each, "attr", getattr(each, "id", "")) in LISTENING_CALLS for each in calls)


def test_the_parts_of_an_answer_on_a_kept_connection_are_sent_at_once() -> None:
    with listen("127.0.0.1", 0, backlog=1) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_every_listener_of_the_product_has_a_server_that_is_tried_here_or_a_reason() -> None:
    files = [path for room in ("rayapp", "actors") for path in (ROOT / room).rglob("*.py")]

    found = {str(path.relative_to(ROOT)) for path in files if "library" not in path.parts and listens(path)}

    assert found == LISTENERS.keys() | WITHOUT_A_KEY.keys()
    assert set(LISTENERS.values()) == SERVERS.keys()


Calls = set[tuple[str, str]]
"""Methods and paths."""
Tried = tuple[httpx.AsyncClient, Calls]
"""A client of the running server, and all calls that it knows."""


def formats(tokenizer: Any) -> Formats:
    return Formats(
        tokenizer, model="m", template=load_template("chatml_hermes"), make_parser=lambda *parts: HermesParser()
    )


def engine(tokenizer: Any) -> ScriptedEngine:
    return ScriptedEngine(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
        lambda name, ids: "yes",
        end_id=tokenizer.eos_token_id,
    )


def of_aiohttp(app: Any) -> Calls:
    return {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}


def of_starlette(app: Any) -> Calls:
    mounts = {("GET", route.path) for route in app.routes if isinstance(route, Mount)}
    routes = [route for route in app.routes if isinstance(route, Route)]
    return mounts | {(method, route.path) for route in routes for method in route.methods or ("GET", "POST")}


@asynccontextmanager
async def gateway(tokenizer: Any) -> AsyncIterator[Tried]:
    served = Gateway(formats(tokenizer))
    await served.start()
    opened = served.session(
        engine=engine(tokenizer),
        sampling=SamplingParams(max_tokens=9),
        limits=SessionLimits(max_tokens=100, max_turns=2),
        request_id=RequestId("group", 0),
    )
    none: Any = None
    calls = of_aiohttp(Api(none).application("/{session}"))
    try:
        with opened as session:
            async with httpx.AsyncClient(base_url=served.url) as client:
                yield client, {(method, path.replace("{session}", session.id)) for method, path in calls}
    finally:
        await served.close()


@asynccontextmanager
async def serve(tokenizer: Any) -> AsyncIterator[Tried]:
    made_of, sampling = (formats(tokenizer), engine(tokenizer)), SamplingParams(max_tokens=9)
    calls = of_aiohttp(open_application(OpenDoor(*made_of, sampling, ["k"]), "m"))
    opened = open_to_all(*made_of, model="m", sampling=sampling, keys=["k"], sockets=bound("127.0.0.1", 0))
    async with opened as url, httpx.AsyncClient(base_url=url) as client:
        yield client, {call for call in calls if call[1] not in OPEN}


@asynccontextmanager
async def sandbox_service(tokenizer: Any) -> AsyncIterator[Tried]:
    config = SandboxConfig(providers=(LocalConfig(max_sandboxes=1),))
    none: Any = None
    app = _application(none, ServerLimits(), none, none, "127.0.0.1", fusion_routes()(none))
    opened = serving(config, keys={"test": "k"}, more_routes=fusion_routes())
    async with opened as url, httpx.AsyncClient(base_url=url) as client:
        # Its numbers name the clients, so /metrics needs a key.
        yield client, {call for call in of_starlette(app) if call[1] != "/health"}


@asynccontextmanager
async def view(tokenizer: Any) -> AsyncIterator[Tried]:
    app: Any = make_app([], token="k")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        yield client, of_starlette(app._app)


@asynccontextmanager
async def model_server(tokenizer: Any) -> AsyncIterator[Tried]:
    """The guard with which `vllm serve` is started, around a server that answers everything. The real vLLM with it is
    in tests/e2e/test_judges.py."""
    command = vllm_serve(ModelServerSection(name="m", path="m"), "m", "127.0.0.1", 1)
    assert command[command.index("--middleware") + 1] == f"{KeyGuard.__module__}.KeyGuard"

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, "k")
        guarded = KeyGuard(answer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=guarded), base_url="http://127.0.0.1") as client:
        assert (await client.get("/health")).status_code == 200
        for headers in ({"Authorization": "Bearer k"}, {"x-api-key": "k"}):
            assert (await client.post("/classify", headers=headers)).status_code == 200
        paths = ("/v1/completions", "/classify", "/tokenize", "/invocations", "/health", "/health/", "//health")
        yield client, {("GET", "/v1/models"), *(("POST", path) for path in paths)}


SERVERS: dict[str, Callable[[Any], AbstractAsyncContextManager[Tried]]] = {
    "gateway": gateway,
    "model server": model_server,
    "sandbox service": sandbox_service,
    "serve": serve,
    "view": view,
}


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("key", ["", "wrong", "Kk"])
async def test_every_call_of_a_server_is_refused_without_its_key(name: str, key: str, chat_tokenizer: Any) -> None:
    headers = {"Authorization": f"Bearer {key}", "x-api-key": key, "e2b-api-key": key} if key else {}
    async with SERVERS[name](chat_tokenizer) as (client, calls):
        assert len(calls) > 2
        for method, path in sorted(calls):
            answer = await client.request(method, path.replace("{model}", "m"), headers=headers, json={})
            assert answer.status_code in (401, 403), (method, path, answer.status_code, answer.text)


def test_a_model_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match="a model server does not start without a key"):
        KeyGuard(app)


@pytest.mark.long  # imports vLLM
async def test_vllm_puts_the_guard_before_all_of_its_own_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import FastAPI
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setenv(KEY_VARIABLE, "k")
    command = vllm_serve(ModelServerSection(name="m", path="m"), "m", "127.0.0.1", 1)
    app = FastAPI()
    app.add_api_route("/tokenize", lambda: "open", methods=["POST"])
    init_entrypoints_middleware(make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:]), app, ("generate",))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        answers = [await client.post("/tokenize", headers=headers) for headers in ({}, {"Authorization": "Bearer k"})]

    assert [answer.status_code for answer in answers] == [401, 200]
