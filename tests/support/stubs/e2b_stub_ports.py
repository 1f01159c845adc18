"""The services inside an E2B sandbox: the agent's files and processes, and the code interpreter. For `e2b_stub.py`."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from support.stubs.boxes import Box, Boxes
from support.stubs.kernel import Kernel
from support.stubs.server import Handler

InBox = Callable[[web.Request, Box], Awaitable[web.StreamResponse]]
_END_OF_STREAM = 2
_CHUNK = 32768


class Ports:
    """Handlers of the ports of every sandbox."""

    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._kernels: dict[str, Kernel] = {}

    def in_box(self, handler: InBox) -> Handler:
        """Find the sandbox by header or by path, as the proxy in front of sandboxes does."""

        async def handle(request: web.Request) -> web.StreamResponse:
            box_id = request.match_info.get("id") or request.headers.get("E2b-Sandbox-Id", "")
            box = self._boxes.get(str(box_id))
            if box is None:
                text = {"sandboxId": box_id, "message": "The sandbox was not found", "code": 502}
                return web.json_response(text, status=502)
            if request.headers.get("X-Access-Token") != box.facts["token"]:
                return web.json_response({"code": 401, "message": "unauthorized"}, status=401)
            if request.get("fault") == "die":
                asyncio.get_running_loop().call_later(0.05, self._boxes.end, str(box_id))
            return await handler(request, box)

        return handle

    async def health(self, request: web.Request, box: Box) -> web.StreamResponse:
        return web.Response(status=204)

    async def read_file(self, request: web.Request, box: Box) -> web.StreamResponse:
        path = box.resolve(request.query["path"])
        if not path.is_file():
            return web.json_response({"code": 404, "message": f"path '{path}' does not exist"}, status=404)
        return web.Response(body=path.read_bytes(), content_type="application/octet-stream")

    async def write_file(self, request: web.Request, box: Box) -> web.StreamResponse:
        name = request.query.get("path", "")
        if request.content_type.startswith("multipart/"):
            part = await (await request.multipart()).next()
            data = bytes(await part.read()) if part is not None and hasattr(part, "read") else b""
            name = name or str(getattr(part, "filename", ""))
        else:
            data = await request.read()
        path = box.write(name, data)
        return web.json_response([{"name": path.name, "type": "file", "path": str(path)}])

    async def start(self, request: web.Request, box: Box) -> web.StreamResponse:
        """`process.Process/Start`: a stream of events in Connect's envelopes."""
        body = await request.read()
        told = json.loads(body[5 : 5 + struct.unpack("!BI", body[:5])[1]])
        asked = told["process"]
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await answer.prepare(request)
        env = box.facts["env"] | asked.get("envs", {})
        process = await box.start([asked["cmd"], *asked.get("args", ())], env=env)
        try:
            await _send(answer, {"event": {"start": {"pid": process.pid}}})
            timeout_ms = float(request.headers.get("connect-timeout-ms") or 0)
            async with asyncio.timeout(timeout_ms / 1000 if timeout_ms else None):
                await self._stream(answer, process, is_cut=request.get("fault") == "cut")
            status = await process.wait()
            end = {"exitCode": status if status >= 0 else -1, "exited": status >= 0, "status": f"exit status {status}"}
            if box.ended.is_set():
                return await _end(answer, {"code": "unavailable", "message": "the connection to the sandbox ended"})
            await _send(answer, {"event": {"end": end}})
            return await _end(answer, None)
        except TimeoutError:
            return await _end(answer, {"code": "deadline_exceeded", "message": "context deadline exceeded"})
        finally:
            box.stop(process)

    async def _stream(self, answer: web.StreamResponse, process: Process, *, is_cut: bool) -> None:
        async def pump(name: str, stream: asyncio.StreamReader | None) -> None:
            while stream is not None and (chunk := await stream.read(_CHUNK)):
                await _send(answer, {"event": {"data": {name: base64.b64encode(chunk).decode()}}})
                if is_cut:
                    raise ConnectionResetError("injected: the stream breaks off")

        async with asyncio.TaskGroup() as group:
            group.create_task(pump("stdout", process.stdout))
            group.create_task(pump("stderr", process.stderr))

    async def execute(self, request: web.Request, box: Box) -> web.StreamResponse:
        """The code interpreter's `/execute`: one JSON object per line."""
        asked = await request.json()
        kernel = self._kernels.setdefault(box.id, Kernel(box))
        answer = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await answer.prepare(request)
        await _line(answer, {"type": "number_of_executions", "execution_count": 1})
        async for event in kernel.run(asked["code"]):
            await _line(answer, event)
            if request.get("fault") == "cut":
                raise ConnectionResetError("injected: the stream breaks off")
        if box.ended.is_set():
            raise ConnectionResetError("the sandbox is gone")
        await _line(answer, {"type": "end_of_execution"})
        await answer.write_eof()
        return answer


async def _send(answer: web.StreamResponse, event: dict[str, Any], flag: int = 0) -> None:
    data = json.dumps(event).encode()
    await answer.write(struct.pack("!BI", flag, len(data)) + data)


async def _end(answer: web.StreamResponse, error: dict[str, str] | None) -> web.StreamResponse:
    await _send(answer, {"error": error} if error is not None else {}, _END_OF_STREAM)
    await answer.write_eof()
    return answer


async def _line(answer: web.StreamResponse, event: dict[str, Any]) -> None:
    await answer.write(json.dumps(event).encode() + b"\n")
