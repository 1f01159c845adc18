"""The sandbox service (`rayapp sandbox serve`): gives other programs sandboxes of a pool, over MCP and HTTP.

POST/GET/DELETE /mcp     streamable HTTP of MCP
POST /run_code           as SandboxFusion's (`fusion.py`)
GET /health              the pool's metrics; the only route without a key

Clients send their key in the header E2B-API-KEY or as a bearer token. `_Guard` checks the key, and limits the request's
body.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress

import h11
import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError
from rayapp.core.http import listen
from rayapp.extras.service.calls import CALL_HEADER, Calls
from rayapp.extras.service.fusion import fusion_routes
from rayapp.extras.service.mcp_tools import SandboxTools, ServerLimits
from rayapp.extras.service.sessions import Sessions
from rayapp.sandbox.pool.build import open_pool
from rayapp.sandbox.pool.pool import LeasePool

PATH, HEALTH_PATH = "/mcp", "/health"
MAX_BODY_BYTES = 24 << 20
_MAX_CONTAINERS, _MAX_STRINGS = 200_000, 40_000  # parsing more of them blocks the loop
_MAX_CONNECTIONS = 4096
_STOP_GRACE_S = 5.0


@asynccontextmanager
async def serving(
    config: SandboxConfig,
    *,
    key: str,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: ServerLimits | None = None,
    lease_timeout_s: float = 120.0,
) -> AsyncIterator[str]:
    """Serve for the length of the block, then end every sandbox. Yield the address, e.g. `http://127.0.0.1:8082`.

    Args:
        key: key that clients send; empty accepts every client.
        port: 0 for any free port.
    Raises ConfigError: the address is taken; SandboxConfigError: a provider's package or key is missing.
    """
    limits = limits or ServerLimits(max_sandbox_ttl_s=config.lease_ttl_s, passes_templates=config.local is None)
    with _listening(host, port) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        async with open_pool(config, f"sandbox-service-{address}") as (sandboxes, pool):
            calls, sessions = Calls(), Sessions(sandboxes, lease_timeout_s=lease_timeout_s)
            app = _Guard(_application(sessions, limits, pool, calls, host), key, calls, sessions)
            server = _Server(_uvicorn_config(app))
            running = asyncio.create_task(server.serve(sockets=[listener]), name="sandbox service")
            try:
                while not server.started and not running.done():  # noqa: ASYNC110  (uvicorn tells in no other way)
                    await asyncio.sleep(0.01)
                yield f"http://{address}"
            finally:
                server.should_exit = True
                await asyncio.wait({running}, timeout=_STOP_GRACE_S)
                running.cancel()
                await asyncio.shield(sessions.close())


def _uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=30,
        limit_concurrency=_MAX_CONNECTIONS,
    )


class _Connection(H11Protocol):
    """A connection with one request at a time: behind a further one uvicorn would not notice that the client hangs up,
    and the first one's code would keep its sandbox."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self.transport.abort()


class _Server(uvicorn.Server):
    """A server that handles no signals: uvicorn would end the process in the middle of the clean-up."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listening(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port, backlog=2048)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}. Choose another --port") from error


def _application(sessions: Sessions, limits: ServerLimits, pool: LeasePool, calls: Calls, host: str) -> Starlette:
    server = MCPServer("rayapp-sandboxes", instructions="Runs code in isolated sandboxes.", log_level="WARNING")
    tools = SandboxTools(sessions, calls, limits)
    for tool in (tools.run_code, tools.run_code_once, tools.run_command):
        server.add_tool(tool, structured_output=True)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "sessions": sessions.num_bound, **pool.stats()})

    server.custom_route(HEALTH_PATH, methods=["GET"])(health)
    # Answers are JSON, not an event stream, because each call has one answer and clients limit the size of events.
    app = server.streamable_http_app(streamable_http_path=PATH, json_response=True, host=host)
    app.router.routes.extend(fusion_routes(sessions, calls))
    return app


class _Guard:
    """Middleware that checks the key, limits the body, and ends a sandbox with its session.

    Only the listed routes need no key. A list of those that need one would be unsafe: the router's pattern ends in `$`,
    which also matches before a newline, so `/mcp%0A` reaches `/mcp`.
    """

    def __init__(self, app: Starlette, key: str, calls: Calls, sessions: Sessions) -> None:
        self._app = app
        self._key = key.encode()
        self._calls = calls
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request = Request(scope)  # a websocket can't come here: uvicorn is configured to refuse them
        is_open = (request.method, scope["path"]) == ("GET", HEALTH_PATH)
        if not is_open and not self._admits(request):
            await _refusal(401, "missing or wrong key: send it as E2B-API-KEY or as a bearer token")(
                scope, receive, send
            )
            return
        if (refusal := _size_refusal(request)) is not None:
            await refusal(scope, receive, send)
            return
        with self._calls.calling() as (call_id, hangup), suppress(ClientDisconnect):
            body = await Request(scope, receive).body()
            if (refusal := _shape_refusal(body)) is not None:
                await refusal(scope, receive, send)
                return
            await self._app(_named(scope, call_id), _watched(body, receive, hangup), send)
        if request.method == "DELETE":
            await self._sessions.end(request.headers.get("mcp-session-id", ""))

    def _admits(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (request.headers.get("e2b-api-key", ""), bearer)
        return not self._key or any(hmac.compare_digest(self._key, each.encode()) for each in given)


def _named(scope: Scope, call_id: str) -> Scope:
    """Return the request with the call's id in `CALL_HEADER`, in place of the client's."""
    name = CALL_HEADER.encode()
    kept = ((key, value) for key, value in scope["headers"] if key.lower() != name)
    return {**scope, "headers": [*kept, (name, call_id.encode())]}


def _watched(body: bytes, receive: Receive, hangup: asyncio.Event) -> Receive:
    """Return a function that gives the body, and waits in the background for the client to hang up."""
    listening: list[asyncio.Task[None]] = []

    async def listen_to_client() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        hangup.set()

    async def received() -> Message:
        if listening:
            await hangup.wait()
            return {"type": "http.disconnect"}
        listening.append(asyncio.create_task(listen_to_client(), name="wait for a client to hang up"))
        return {"type": "http.request", "body": body}

    return received


def _size_refusal(request: Request) -> JSONResponse | None:
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not length.isdecimal():
        return _refusal(411, "the request must give its length: send Content-Length, not chunks")
    if int(length) > MAX_BODY_BYTES:
        return _refusal(413, f"the request is larger than {MAX_BODY_BYTES >> 20} MiB")
    return None


def _shape_refusal(body: bytes) -> JSONResponse | None:
    num_containers = body.count(b"[") + body.count(b"{")  # also in strings
    num_strings = (body.count(b'"') - body.count(b'\\"')) // 2
    if num_containers <= _MAX_CONTAINERS and num_strings <= _MAX_STRINGS:
        return None
    limits = f"{_MAX_CONTAINERS:,} lists and objects, or more than {_MAX_STRINGS:,} strings and fields"
    return _refusal(413, f"the request holds more than {limits}")


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse({"code": status, "message": message}, status_code=status)
