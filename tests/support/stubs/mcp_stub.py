"""An MCP server on loopback with the three tools of OpenKruise's sandbox server, made with the SDK's own server.

    async with McpStub().running() as url: McpConfig(url=url)

An MCP session has one sandbox, which lives for X-Sandbox-TTL seconds; run_code_once makes one for a single run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from support.stubs.boxes import Box, Boxes
from support.stubs.faults import Faults
from support.stubs.kernel import Kernel

API_KEY, TEMPLATE = "key-of-the-stub", "code-interpreter"


class McpStub:
    """See the module."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.boxes = Boxes()
        self.faults = faults or Faults()
        self.headers: list[dict[str, str]] = []
        """Headers of every tool call."""
        self.calls: list[tuple[str, frozenset[str]]] = []
        """Name of every tool that was called, with the names of its arguments."""
        self._by_session: dict[str, Box] = {}
        self._kernels: dict[str, Kernel] = {}
        self._server = MCPServer("sandboxes")
        for tool in (self.run_code, self.run_code_once, self.run_command):
            self._server.add_tool(tool, structured_output=True)

    @property
    def num_sessions(self) -> int:
        """Sessions that clients opened and did not end."""
        return len(self._server.session_manager._server_instances)

    async def run_code(self, code: str, ctx: Context[Any, Any], language: str = "python") -> dict[str, Any]:
        """Run code in the MCP session's interpreter."""
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
        """Run a shell command in the MCP session's sandbox."""
        box = await self._box(ctx, "run_command")
        limit_s = float(self.headers[-1].get("x-execution-timeout", 60))
        status, out, err = await box.run(["bash", "-c", cmd], timeout_s=limit_s, env=envs)
        if box.ended.is_set():
            raise ToolError(f"sandbox {box.id} was not found")
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
        fault = self.faults.choose(tool)
        if fault == "500":
            raise ToolError("sandbox execution failed: injected")
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
            raise ToolError(f"sandbox {self._by_session[session].id} was not found")
        return box

    def _new_box(self, headers: Mapping[str, str]) -> Box:
        if (template := headers.get("x-template", TEMPLATE)) != TEMPLATE:
            raise ToolError(f"failed to create sandbox: template '{template}' not found")
        return self.boxes.create(
            template=headers.get("x-template", ""), labels={}, ttl_s=float(headers.get("x-sandbox-ttl", 300))
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve until the block is left; the value is the endpoint."""
        app = _Door(self._server.streamable_http_app(), self.faults, self.calls)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.should_exit = True
            self.boxes.close()
            await asyncio.wait({serving}, timeout=5.0)


class _Door:
    """Wraps the server: refuses requests without the key, and injects faults (call `post`: within an MCP session)."""

    def __init__(self, app: ASGIApp, faults: Faults, calls: list[tuple[str, frozenset[str]]]) -> None:
        self._app = app
        self._faults = faults
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if request.headers.get("E2B-API-KEY") != API_KEY:
            refusal = JSONResponse({"code": 401, "message": "invalid key"}, status_code=401)
            await refusal(scope, receive, send)
            return
        is_call = request.method == "POST" and "mcp-session-id" in request.headers
        fault = self._faults.choose("post") if is_call else ""
        if (answer := await self._failed(fault)) is not None:
            await answer(scope, receive, send)
            return
        reading = self._noting(receive) if is_call else receive
        await self._app(scope, reading, _without_the_end(send) if fault == "cut" else send)

    def _noting(self, receive: Receive) -> Receive:
        body = bytearray()

        async def noted() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                asked = json.loads(body)
                if asked.get("method") == "tools/call":
                    self._calls.append((asked["params"]["name"], frozenset(asked["params"]["arguments"])))
            return message

        return noted

    async def _failed(self, fault: str) -> Response | None:
        if fault == "hang":
            await asyncio.sleep(self._faults.hang_s)
        if fault in ("429", "500", "502", "503"):
            headers = {"Retry-After": str(self._faults.retry_after_s)} if fault == "429" else None
            return JSONResponse({"message": "injected failure"}, status_code=int(fault), headers=headers)
        if fault == "lost-session":
            return JSONResponse({"message": "session not found"}, status_code=404)
        return Response('{"half": ', media_type="application/json") if fault == "garbage" else None


def _without_the_end(send: Send) -> Send:
    """Return a `send` that passes on the head of an answer and fails where its body begins."""

    async def cut(message: Message) -> None:
        if message["type"] == "http.response.body":
            raise ConnectionResetError("injected: the answer breaks off")
        await send(message)

    return cut
