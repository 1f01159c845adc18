"""A reverse proxy between a client and an S3 server that fails on purpose: lost answers, cut bodies, damaged bytes.

Tests pass a `plan`, a function that returns the fault of a request or None. The proxy also records the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import aiohttp
from aiohttp import web


class Fault(StrEnum):
    SLOW_DOWN = "slow_down"
    """503 with S3's SlowDown, without passing the request on."""
    DROP = "drop"
    """The connection is cut before the request reaches the server."""
    LOSE_ANSWER = "lose_answer"
    """The server does it, but the connection is cut before the answer."""
    CUT_BODY = "cut_body"
    """Half of the answer's body, then the connection is cut."""
    FLIP_BYTE = "flip_byte"
    """One byte of the answer's body is changed."""
    EXPIRED = "expired"
    """400 with S3's ExpiredToken."""
    DENIED = "denied"
    """403 with S3's AccessDenied."""
    FULL = "full"
    """507 with MinIO's XMinioStorageFull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request. Example: `Seen(method="PUT", path="/bucket/key", query="partNumber=2&uploadId=…")`."""

    method: str
    path: str
    query: str

    @property
    def is_part(self) -> bool:
        return self.method == "PUT" and "partNumber=" in self.query


Plan = Callable[[Seen], Fault | None]
_ANSWERS = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.EXPIRED: (400, "ExpiredToken"),
    Fault.DENIED: (403, "AccessDenied"),
    Fault.FULL: (507, "XMinioStorageFull"),
}


class FaultyProxy:
    """Use as `async with FaultyProxy(server.url) as proxy:`, then talk to `proxy.url`."""

    def __init__(self, target_url: str) -> None:
        self.plan: Plan = lambda _: None
        self.seen: list[Seen] = []
        self.url = ""
        self._target_url = target_url

    async def __aenter__(self) -> FaultyProxy:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self._session = aiohttp.ClientSession(auto_decompress=False)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        seen = Seen(method=request.method, path=request.path, query=request.query_string)
        self.seen.append(seen)
        fault = self.plan(seen)
        if fault in _ANSWERS:
            status, code = _ANSWERS[fault]
            await request.read()
            return _xml(request, status, code)
        if fault is Fault.DROP:
            return _cut(request)
        status, headers, body = await self._forward(request)
        if fault is Fault.LOSE_ANSWER:
            return _cut(request)
        if fault is Fault.FLIP_BYTE and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        return await _send(request, status, headers, body, cut=fault is Fault.CUT_BODY)

    async def _forward(self, request: web.Request) -> tuple[int, dict[str, str], bytes]:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() != "content-length"}
        from yarl import URL

        target = URL(self._target_url + request.raw_path, encoded=True)
        async with self._session.request(request.method, target, data=body, headers=headers) as answer:
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in {"transfer-encoding", "connection", "server", "date"}
            }
            return answer.status, kept, await answer.read()


def _xml(request: web.Request, status: int, code: str) -> web.Response:
    body = "" if request.method == "HEAD" else f"<Error><Code>{code}</Code><Message>injected</Message></Error>"
    return web.Response(status=status, text=body, content_type="application/xml")


def _cut(request: web.Request) -> web.StreamResponse:
    transport: Any = request.transport
    transport.abort()
    return web.Response()


async def _send(
    request: web.Request, status: int, headers: dict[str, str], body: bytes, *, cut: bool
) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers=headers)
    if request.method != "HEAD":
        response.content_length = len(body)
    await response.prepare(request)
    if request.method != "HEAD":
        await response.write(body[: len(body) // 2] if cut else body)
    if cut:
        return _cut(request)
    await response.write_eof()
    return response
