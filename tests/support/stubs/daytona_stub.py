"""Daytona's API and toolbox on loopback, for tests. Answers are checked against the SDK's own models before they leave.

async with DaytonaStub().running() as url: DaytonaConfig(api_url=f"{url}/api")
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

from aiohttp import WSMsgType, web

from support.stubs.boxes import Box
from support.stubs.faults import Faults
from support.stubs.kernel import Kernel
from support.stubs.server import Handler, StubServer

API_KEY = "dtn_0000000000000000000000000000000000000000"
SNAPSHOT = "small"
"""The only one that exists, besides the default."""
_TIMEOUT_CLOSE = 4008


class DaytonaStub(StubServer):
    """See the module.

    Args:
        max_alive: quota; 0 is none.
    """

    def __init__(self, *, max_alive: int = 0, faults: Faults | None = None) -> None:
        super().__init__(faults)
        self.max_alive = max_alive
        self.bodies: list[dict[str, Any]] = []
        """Body of every request that creates a sandbox."""

        self._kernels: dict[str, Kernel] = {}
        for method, path, call, handler in (
            ("POST", "/api/sandbox", "create", self._create),
            ("GET", "/api/sandbox", "list", self._list),
            ("GET", "/api/sandbox/{id}", "info", self._info),
            ("DELETE", "/api/sandbox/{id}", "kill", self._kill),
            ("POST", "/api/sandbox/{id}/ttl/{minutes}", "extend", self._ttl),
            ("POST", "/api/sandbox/{id}/last-activity", "activity", self._accepted),
        ):
            self.app.router.add_route(method, path, self.wrap(call, self._with_key(handler)))
        for method, path, call, handler in (
            ("POST", "/toolbox/{id}/process/execute", "execute", self._execute),
            ("POST", "/toolbox/{id}/files/bulk-upload", "write", self._upload),
            ("GET", "/toolbox/{id}/process/interpreter/execute", "session", self._session),
        ):
            self.app.router.add_route(method, path, self.wrap(call, self._with_key(handler)))

    def fail(self, request: web.Request, status: int, message: str, **headers: str) -> web.Response:
        body = {"statusCode": status, "message": message, "error": message, "path": request.path, "method": "x"}
        return web.json_response(body, status=status, headers=headers)

    def _with_key(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if request.headers.get("Authorization") != f"Bearer {API_KEY}":
                return self.fail(request, 401, "Invalid credentials")
            box_id = request.match_info.get("id")
            if box_id is not None:
                box = self.boxes.get(box_id)
                if box is None:
                    return self.fail(request, 404, f"Sandbox with ID {box_id} not found")
                request["box"] = box
                if request.get("fault") == "die":
                    asyncio.get_running_loop().call_later(0.05, self.boxes.end, box_id)
            return await handler(request)

        return handle

    def _checked(self, model: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return an answer after the installed client's model has parsed it, so that stub and client can't drift
        apart."""
        import daytona_api_client_async.models as models

        getattr(models, model).from_dict(body)
        return body

    def _dto(self, box: Box) -> dict[str, Any]:
        body = box.facts["body"]
        return self._checked(
            "Sandbox",
            {
                "id": box.id,
                "organizationId": "org",
                "name": box.id,
                "snapshot": box.template,
                "user": "daytona",
                "env": body.get("env", {}),
                "labels": box.labels,
                "public": False,
                "networkBlockAll": bool(body.get("networkBlockAll")),
                "kvm": False,
                "target": "us",
                "cpu": 1,
                "gpu": 0,
                "memory": 1,
                "disk": 3,
                "state": "started",
                "desiredState": "started",
                "toolboxProxyUrl": f"{self.url}/toolbox",
            },
        )

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        snapshot = body.get("snapshot")
        if snapshot and snapshot != SNAPSHOT:
            return self.fail(request, 404, f"Snapshot {snapshot} not found")
        if self.max_alive and len(self.boxes.living) >= self.max_alive:
            return self.fail(request, 403, f"Sandbox quota exceeded: maximum allowed is {self.max_alive}")
        ttl_s = body.get("ttlMinutes", 0) * 60 or math.inf
        box = self.boxes.create(template=snapshot or "default", labels=body.get("labels", {}), ttl_s=ttl_s, body=body)
        return web.json_response(self._dto(box))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        labels = json.loads(request.query.get("labels") or "{}")
        found = self.boxes.with_labels(labels)
        size, start = 2, int(request.query.get("cursor") or 0)
        item = {"kvm", "env"}
        items = [{k: v for k, v in self._dto(box).items() if k not in item} for box in found[start : start + size]]
        cursor = str(start + size) if start + size < len(found) else None
        return web.json_response(self._checked("ListSandboxesResponse", {"items": items, "nextCursor": cursor}))

    async def _info(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._dto(request["box"]))

    async def _kill(self, request: web.Request) -> web.StreamResponse:
        answer = self._dto(request["box"]) | {"state": "destroying", "desiredState": "destroyed"}
        self.boxes.end(request["box"].id)
        return web.json_response(answer)

    async def _ttl(self, request: web.Request) -> web.StreamResponse:
        request["box"].ends_at = time.time() + float(request.match_info["minutes"]) * 60
        return web.json_response(self._dto(request["box"]))

    async def _accepted(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=201)

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        box: Box = request["box"]
        asked = await request.json()
        env = box.facts["body"].get("env", {}) | (asked.get("envs") or {})
        try:
            status, out, _ = await box.run(
                ["bash", "-c", asked["command"]], timeout_s=asked.get("timeout") or 360, env=env, merge_stderr=True
            )
        except TimeoutError:
            return self.fail(request, 408, "command execution timeout")
        if box.ended.is_set():
            return self.fail(request, 502, "failed to proxy to the sandbox")
        return web.json_response({"exitCode": status, "result": out.decode(errors="replace")})

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        path = ""
        async for part in await request.multipart():
            data = bytes(await part.read())  # type: ignore[union-attr]
            if str(getattr(part, "name", "")).endswith(".path"):
                path = data.decode()
            else:
                request["box"].write(path, data)
        return web.json_response({})

    async def _session(self, request: web.Request) -> web.StreamResponse:
        box: Box = request["box"]
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        message = await socket.receive()
        if message.type is not WSMsgType.TEXT:
            return socket
        asked = json.loads(message.data)
        kernel = self._kernels.setdefault(box.id, Kernel(box))
        running = asyncio.ensure_future(self._stream(socket, kernel, asked["code"]))
        await _until_gone(socket, running, timeout_s=asked.get("timeout"))
        await socket.close()
        return socket

    @staticmethod
    async def _stream(socket: web.WebSocketResponse, kernel: Kernel, code: str) -> None:
        events = kernel.run(code)
        try:
            async for event in events:
                await socket.send_json(event)
        finally:
            await events.aclose()


async def _until_gone(socket: web.WebSocketResponse, running: asyncio.Future[Any], *, timeout_s: float | None) -> None:
    """Wait until the work is done, the client hangs up, or the time is over; tell the client about the last."""
    listening = asyncio.ensure_future(socket.receive())
    try:
        done, _ = await asyncio.wait({listening, running}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            await socket.close(code=_TIMEOUT_CLOSE, message=b"execution timed out")
    finally:
        for task in (listening, running):
            task.cancel()
        await asyncio.gather(listening, running, return_exceptions=True)
