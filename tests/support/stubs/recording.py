"""All that passes to and fro at a stub server, to be compared with what the real service's clients know."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from support.stubs.server import StubServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    method: str
    path: str
    """Without what the stub puts before the service's own paths."""
    asked: Any
    status: int
    answer: Any


def record(stub: StubServer, prefix: str) -> list[Exchange]:
    """Return a list to which the stub adds every exchange. `prefix` is a pattern of what it puts before paths."""
    seen: list[Exchange] = []

    @web.middleware
    async def note(request: web.Request, handler: Any) -> web.StreamResponse:
        is_json = request.content_type == "application/json"
        asked = json.loads(await request.read()) if is_json and request.can_read_body else None
        answer: web.StreamResponse = await handler(request)
        body = answer.body if isinstance(answer, web.Response) else None
        is_told = isinstance(body, bytes) and body and answer.content_type == "application/json"
        exchange = Exchange(
            method=request.method, path=re.sub(prefix, "", request.path), asked=asked, status=answer.status,
            answer=json.loads(body) if is_told and isinstance(body, bytes) else None,
        )  # fmt: skip
        seen.append(exchange)
        return answer

    stub.app.middlewares.append(note)
    return seen
