"""The frame of every stub server: a socket on loopback, faults around each call, orderly end. Built on aiohttp."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from rayapp.core.own_thread import LoopThread
from support.stubs.boxes import Boxes
from support.stubs.faults import Faults

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StubServer:
    """A service on loopback. Subclasses add routes."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.boxes = Boxes()
        self.faults = faults or Faults()
        self.requests: list[str] = []
        """Method and path of the last calls, oldest first."""
        self.url = ""
        self.app = web.Application(client_max_size=64 << 20)

    def fail(self, request: web.Request, status: int, message: str, **headers: str) -> web.Response:
        """Return an error answer in this service's form."""
        return web.json_response({"code": status, "message": message}, status=status, headers=headers)

    def wrap(self, call: str, handler: Handler) -> Handler:
        """Return a handler that fails as `faults` chooses."""

        async def handle(request: web.Request) -> web.StreamResponse:
            self.requests = [*self.requests[-999:], f"{request.method} {request.path}"]
            fault = self.faults.choose(call)
            if fault == "drop":
                return self._hang_up(request)
            if fault == "hang":
                await asyncio.sleep(self.faults.hang_s)
                return self._hang_up(request)
            if fault == "429":
                return self.fail(request, 429, "Rate limit exceeded", **{"Retry-After": str(self.faults.retry_after_s)})
            if fault in ("500", "502", "503"):
                return self.fail(request, int(fault), "injected failure")
            if fault == "garbage":
                return web.Response(text='{"half": ', content_type="application/json", status=200)
            if fault == "slow":
                await asyncio.sleep(self.faults.slow_s)
            request["fault"] = fault
            answer = await handler(request)
            return self._hang_up(request) if fault == "lost" else answer

        return handle

    @staticmethod
    def _hang_up(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("injected")

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        """Serve until the block is left; the value is the base URL."""
        runner = web.AppRunner(self.app, access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", port, shutdown_timeout=0.1, backlog=4096)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self.url
        finally:
            self.boxes.close()
            await runner.cleanup()

    @contextmanager
    def running_in_thread(self) -> Iterator[str]:
        """Serve from a thread, for tests without an event loop; the value is the base URL."""
        thread, serving = LoopThread("stub-server"), self.running()
        try:
            yield thread.run(serving.__aenter__())
        finally:
            thread.run(serving.__aexit__(None, None, None))
            thread.close()
