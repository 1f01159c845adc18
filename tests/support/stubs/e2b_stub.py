"""E2B's protocol on loopback, for tests: control plane, agent (envd) and code interpreter, after the published specs.

    async with E2BStub().running() as url: E2BConfig(api_url=url, sandbox_url=url)
    async with E2BStub(dialect="kruise").running() as url: E2BConfig(api_url=f"{url}/kruise/api")

Dialect kruise has no `/v2` routes for creating, meets a quota with 403, and reaches ports by path.
"""

from __future__ import annotations

import time
import urllib.parse
import uuid
from datetime import UTC, datetime
from typing import Any, Literal

from aiohttp import web

from support.stubs.boxes import Box
from support.stubs.e2b_stub_ports import Ports
from support.stubs.faults import Faults
from support.stubs.server import Handler, StubServer

API_KEY = "e2b_0000000000000000000000000000000000000000"
ENVD_VERSION = "0.5.8"


class E2BStub(StubServer):
    """See the module.

    Args:
        max_alive: quota; 0 is none.
        page: sandboxes per page of a listing.
    """

    def __init__(
        self,
        *,
        dialect: Literal["e2b", "kruise"] = "e2b",
        max_alive: int = 0,
        page: int = 100,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(faults)
        self.max_alive = max_alive
        self.bodies: list[dict[str, Any]] = []
        """Body of every request that creates a sandbox."""
        self._dialect = dialect
        self._templates = ["code-interpreter-v1", "code-interpreter", "base"]
        self._page = page
        self._by_key: dict[str, Box] = {}
        self._ports = Ports(self.boxes)
        self._add_control_routes("/kruise/api" if dialect == "kruise" else "")
        self._add_port_routes()

    def _add_control_routes(self, prefix: str) -> None:
        one = f"{prefix}/sandboxes/{{id}}"
        for method, path, call, handler in (
            ("POST", f"{prefix}/sandboxes", "create", self._create),
            *((("POST", "/v2/sandboxes", "create", self._create),) if self._dialect == "e2b" else ()),
            ("GET", f"{prefix}/v2/sandboxes", "list", self._list),
            ("GET", one, "info", self._info),
            ("DELETE", one, "kill", self._kill),
            ("POST", f"{one}/timeout", "extend", self._timeout),
        ):
            self.app.router.add_route(method, path, self.wrap(call, self._with_key(handler)))

    def _add_port_routes(self) -> None:
        for method, path, call, handler in (
            ("GET", "/health", "health", self._ports.health),
            ("GET", "/files", "read", self._ports.read_file),
            ("POST", "/files", "write", self._ports.write_file),
            ("POST", "/process.Process/Start", "start", self._ports.start),
            ("POST", "/execute", "execute", self._ports.execute),
        ):
            wrapped = self.wrap(call, self._ports.in_box(handler))
            self.app.router.add_route(method, path, wrapped)
            self.app.router.add_route(method, f"/kruise/{{id}}/{{port}}{path}", wrapped)

    def _with_key(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if request.headers.get("X-API-KEY") != API_KEY:
                return self.fail(request, 401, "Invalid API key")
            return await handler(request)

        return handle

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        key = request.headers.get("Idempotency-Key", "")
        if key and key in self._by_key:
            return web.json_response(self._created(self._by_key[key]), status=201)
        if body.get("templateID") not in self._templates:
            status = 400 if self._dialect == "kruise" else 404
            return self.fail(request, status, f"template '{body.get('templateID')}' not found")
        if self.max_alive and len(self.boxes.living) >= self.max_alive:
            status = 403 if self._dialect == "kruise" else 429
            return self.fail(
                request, status, f"you have reached the maximum number of concurrent E2B sandboxes ({self.max_alive})"
            )
        box = self.boxes.create(
            template=body["templateID"],
            labels=body.get("metadata", {}),
            ttl_s=body.get("timeout", 300),
            env=body.get("envVars", {}),
            token=uuid.uuid4().hex,
        )
        if key:
            self._by_key[key] = box
        return web.json_response(self._created(box), status=201)

    def _created(self, box: Box) -> dict[str, Any]:
        return {
            "templateID": box.template,
            "sandboxID": box.id,
            "clientID": "00000000",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": box.facts["token"],
            "domain": None,
        }

    @staticmethod
    def _detail(box: Box) -> dict[str, Any]:
        def time_of(seconds: float) -> str:
            return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")

        return {
            "templateID": box.template,
            "sandboxID": box.id,
            "clientID": "00000000",
            "startedAt": time_of(box.home.stat().st_ctime),
            "endAt": time_of(box.ends_at),
            "cpuCount": 2,
            "memoryMB": 512,
            "diskSizeMB": 1024,
            "metadata": box.labels,
            "state": "running",
            "envdVersion": ENVD_VERSION,
        }

    async def _list(self, request: web.Request) -> web.StreamResponse:
        pairs = urllib.parse.parse_qsl(request.query.get("metadata", ""))
        labels = {urllib.parse.unquote(key): urllib.parse.unquote(value) for key, value in pairs}
        found = self.boxes.with_labels(labels)
        start = int(request.query.get("nextToken") or 0)
        size = min(self._page, int(request.query.get("limit") or self._page))
        headers = {"x-next-token": str(start + size)} if start + size < len(found) else {}
        return web.json_response([self._detail(box) for box in found[start : start + size]], headers=headers)

    async def _info(self, request: web.Request) -> web.StreamResponse:
        box = self.boxes.get(request.match_info["id"])
        return web.json_response(self._detail(box)) if box is not None else self._unknown(request)

    async def _kill(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=204) if self.boxes.end(request.match_info["id"]) else self._unknown(request)

    async def _timeout(self, request: web.Request) -> web.StreamResponse:
        box = self.boxes.get(request.match_info["id"])
        if box is None:
            return self._unknown(request)
        box.ends_at = time.time() + (await request.json())["timeout"]
        return web.Response(status=204)

    def _unknown(self, request: web.Request) -> web.Response:
        return self.fail(request, 404, f"sandbox {request.match_info['id']} not found")
