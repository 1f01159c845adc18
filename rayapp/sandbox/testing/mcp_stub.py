"""An MCP server on loopback with the three tools of OpenKruise's sandbox server, made with the SDK's own server.

    async with McpStub().running() as url: McpConfig(url=url)

A session binds one sandbox, which lives for X-Sandbox-TTL seconds; run_code_once makes one for a single run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rayapp.sandbox.testing.boxes import Box, Boxes
from rayapp.sandbox.testing.faults import Faults
from rayapp.sandbox.testing.kernel import Kernel

API_KEY = "key-of-the-stub"
_FAULTS = ("500", "hang", "die", "slow")


class McpStub:
    """See the module."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.boxes = Boxes()
        self.faults = faults or Faults()
        self.headers: list[dict[str, str]] = []
        """Of every call of a tool."""
        self._by_session: dict[str, Box] = {}
        self._kernels: dict[str, Kernel] = {}
        self._server = MCPServer("sandboxes")
        for tool in (self.run_code, self.run_code_once, self.run_command):
            self._server.add_tool(tool, structured_output=True)

    async def run_code(self, code: str, ctx: Context[Any, Any], language: str = "python") -> dict[str, Any]:
        """Run code in the session's interpreter."""
        box = await self._box(ctx, "run_code")
        return await self._execute(box, code)

    async def run_code_once(self, code: str, ctx: Context[Any, Any], language: str = "python") -> dict[str, Any]:
        """Run code in a sandbox of its own."""
        headers = await self._enter(ctx, "run_code_once")
        box = self._new_box(headers)
        try:
            return await self._execute(box, code)
        finally:
            self.boxes.end(box.id)

    async def run_command(
        self, cmd: str, ctx: Context[Any, Any], envs: dict[str, str] | None = None, cwd: str | None = None
    ) -> dict[str, Any]:
        """Run a shell command in the session's sandbox."""
        box = await self._box(ctx, "run_command")
        limit_s = float(self.headers[-1].get("x-execution-timeout", 60))
        status, out, err = await box.run(["bash", "-c", cmd], timeout_s=limit_s, env=envs)
        if box.ended.is_set():
            raise RuntimeError(f"sandbox {box.id} was not found")
        return {
            "stdout": out.decode(errors="replace"),
            "stderr": err.decode(errors="replace"),
            "exit_code": status,
            "sandbox_id": box.id,
        }

    async def _execute(self, box: Box, code: str) -> dict[str, Any]:
        kernel = self._kernels.setdefault(box.id, Kernel(box))
        logs: dict[str, list[str]] = {"stdout": [], "stderr": []}
        answer: dict[str, Any] = {"logs": logs, "results": [], "sandbox_id": box.id}
        async for event in kernel.run(code):
            if event["type"] in logs:
                logs[event["type"]].append(event["text"])
            else:
                answer["error"] = {key: event[key] for key in ("name", "value", "traceback")}
        return answer

    async def _enter(self, ctx: Context[Any, Any], tool: str) -> Mapping[str, str]:
        headers = {key.lower(): value for key, value in (ctx.headers or {}).items()}
        self.headers.append(headers)
        fault = self.faults.choose(tool, _FAULTS)
        if fault == "500":
            raise RuntimeError("sandbox execution failed: injected")
        if fault == "hang":
            await asyncio.sleep(self.faults.hang_s)
        if fault == "slow":
            await asyncio.sleep(self.faults.slow_s)
        if fault == "die" and (box := self._by_session.get(headers.get("mcp-session-id", ""))) is not None:
            self.boxes.end(box.id)
        return headers

    async def _box(self, ctx: Context[Any, Any], tool: str) -> Box:
        headers = await self._enter(ctx, tool)
        session = headers.get("mcp-session-id", "")
        if session not in self._by_session:
            self._by_session[session] = self._new_box(headers)
        box = self.boxes.get(self._by_session[session].id)
        if box is None:
            raise RuntimeError(f"sandbox {self._by_session[session].id} was not found")
        return box

    def _new_box(self, headers: Mapping[str, str]) -> Box:
        return self.boxes.create(
            template=headers.get("x-template", ""), labels={}, ttl_s=float(headers.get("x-sandbox-ttl", 300))
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve until the block is left; the value is the endpoint."""
        app = _WithKey(self._server.streamable_http_app())
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve())
        try:
            while not server.started:  # noqa: ASYNC110  (uvicorn tells in no other way)
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.should_exit = True
            self.boxes.close()
            await asyncio.wait({serving}, timeout=5.0)


class _WithKey:
    """Refuses requests without the key, as the server does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and Request(scope).headers.get("E2B-API-KEY") != API_KEY:
            refusal: Response = JSONResponse({"code": 401, "message": "invalid key"}, status_code=401)
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)
