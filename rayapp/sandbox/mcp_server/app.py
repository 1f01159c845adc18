"""The MCP server over the sandbox pool: its web application, its key check, and its start and end.

POST/GET/DELETE /mcp   streamable HTTP, with the key in E2B-API-KEY (or Authorization: Bearer)
GET /health            the pool's counts; the only route without a key
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError
from rayapp.sandbox.mcp_server.tools import SandboxTools, ServerLimits, Sessions
from rayapp.sandbox.pool.build import open_pool
from rayapp.sandbox.pool.pool import LeasePool

PATH, HEALTH_PATH = "/mcp", "/health"
_STOP_GRACE_S = 5.0


@asynccontextmanager
async def serving(
    config: SandboxConfig,
    *,
    api_key: str,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: ServerLimits | None = None,
    lease_timeout_s: float = 120.0,
) -> AsyncIterator[str]:
    """Serve until the block is left, then end every sandbox. Yields the endpoint.

    Args:
        api_key: empty accepts every client.
        port: 0 takes a free one.
        lease_timeout_s: longest wait for a sandbox.
    Raises:
        ConfigError: the address is not available.
        SandboxConfigError: a provider's package or key is missing.
    """
    limits = limits or ServerLimits(max_sandbox_ttl_s=config.lease_ttl_s, passes_templates=config.local is None)
    with _listening(host, port) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        async with open_pool(config, f"mcp-server-{address}") as (client, pool):
            sessions = Sessions(client, lease_timeout_s=lease_timeout_s)
            app = _McpGuard(_application(sessions, limits, pool, host), api_key, sessions)
            server = _Server(uvicorn.Config(app, ws="none", log_level="warning", timeout_graceful_shutdown=2))
            running = asyncio.create_task(server.serve(sockets=[listener]), name="MCP server")
            try:
                while not server.started and not running.done():  # noqa: ASYNC110  (uvicorn tells in no other way)
                    await asyncio.sleep(0.01)
                yield f"http://{address}{PATH}"
            finally:
                server.should_exit = True
                await asyncio.wait({running}, timeout=_STOP_GRACE_S)
                running.cancel()
                await asyncio.shield(sessions.close())


class _Server(uvicorn.Server):
    """Leaves signals to the caller: uvicorn would end the process in the middle of the clean-up."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}. Choose another --port") from error


def _application(sessions: Sessions, limits: ServerLimits, pool: LeasePool, host: str) -> ASGIApp:
    server = MCPServer("rayapp-sandboxes", instructions="Runs code in isolated sandboxes.", log_level="WARNING")
    tools = SandboxTools(sessions, limits)
    for tool in (tools.run_code, tools.run_code_once, tools.run_command):
        server.add_tool(tool, structured_output=True)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", "sessions": sessions.num_bound, **pool.stats()})

    server.custom_route(HEALTH_PATH, methods=["GET"])(health)
    # JSON, not an event stream: each call has one answer, and clients cap the size of events.
    return server.streamable_http_app(streamable_http_path=PATH, json_response=True, host=host)


class _McpGuard:
    """Checks the key, and gives a session's sandbox back when its client ends the session.

    It lists the routes without a key, not those with one: the router behind it matches more spellings of a path than
    one expects (its pattern ends in `$`, which also matches before a newline: `/mcp%0A` is `/mcp`).
    """

    def __init__(self, app: ASGIApp, api_key: str, sessions: Sessions) -> None:
        self._app = app
        self._api_key = api_key
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request = Request(scope)  # AssertionError for a websocket, which uvicorn is configured to refuse
        is_open = (request.method, scope["path"]) == ("GET", HEALTH_PATH)
        if not is_open and not self._may_enter(request):
            refusal = JSONResponse({"code": 401, "message": "missing or wrong E2B-API-KEY"}, status_code=401)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)
        if request.method == "DELETE":
            await self._sessions.end(request.headers.get("mcp-session-id", ""))

    def _may_enter(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = (request.headers.get("e2b-api-key", ""), bearer)
        return not self._api_key or any(hmac.compare_digest(key.encode(), self._api_key.encode()) for key in given)
