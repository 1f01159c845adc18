"""One session with an MCP server, for the sandbox provider and for tools of MCP servers.

The SDK's client must be entered and left in the same asyncio task, so one task holds it, and others call it meanwhile.
Methods raise the SDK's errors, which each caller converts.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import httpx2

from rayapp.core.errors import first_error

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger(__name__)
_LOST = ("connection", "session", "terminated", "closed", "cancelled")
_MAX_EVENT_BYTES = 40 << 20  # the largest report takes 14 MiB, and a server sends it twice: as text and as JSON
_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
_TIMEOUT = httpx2.Timeout(30.0, read=None, pool=None)
Wrap = Callable[[httpx2.AsyncBaseTransport], httpx2.AsyncBaseTransport]


class RpcError(Exception):
    """A call was answered with an error of the protocol (JSON-RPC)."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[RpcError], tuple[int, str]]:
        return type(self), (self.code, str(self))

    @property
    def is_lost(self) -> bool:
        """True if the session itself failed, which only the error's text shows."""
        return any(word in str(self).lower() for word in _LOST)


class McpSession:
    """A session with an MCP server; `open` opens it, `close` ends it. `wrap` wraps the HTTP transport."""

    def __init__(self, url: str, headers: Mapping[str, str], *, wrap: Wrap | None = None) -> None:
        # The import of the SDK takes 1.5 s. It is done here, so that only processes that use a server need this time,
        # and before the deadline of `open` starts.
        import mcp.client.streamable_http  # noqa: F401

        self.status = 0  # last HTTP status: the SDK raises the same error for a wrong key and a busy server
        self._url = url
        self._headers = dict(headers)
        self._wrap = wrap
        self._client: Client | None = None
        self._is_over = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._client is not None and not self._is_over.is_set()

    async def open(self, *, timeout_s: float) -> None:
        """Connect and complete the handshake. Any error of the SDK may come; `status` may have the reason."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready), name=f"MCP session {self._url}")
        try:
            async with asyncio.timeout(timeout_s):
                await ready
        except BaseException:
            await self.close(timeout_s=1.0)
            raise

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        try:
            transport = streamable_http_client(
                self._url, http_client=(http := self._http()), max_sse_event_size=_MAX_EVENT_BYTES
            )
            # The mode is `legacy` because the servers that rayapp uses keep sessions. The newer protocol begins with a
            # request outside a session.
            async with http, Client(transport, mode="legacy") as client:
                self._client = client
                ready.set_result(None)
                await self._is_over.wait()
        # boundary: the SDK raises exception groups of many types; the waiting caller gets the error
        except Exception as error:
            if not ready.done():
                ready.set_exception(first_error(error))
            else:
                log.warning("the session with %s ended: %r", self._url, first_error(error))
        finally:
            self._client = None
            if not ready.done():
                ready.cancel()

    def _http(self) -> httpx2.AsyncClient:
        hooks: Any = {"response": [self._note_status]}
        # Without `wrap` the client's default transport is used, which honours proxies from environment variables.
        transport = (
            self._wrap(httpx2.AsyncHTTPTransport(verify=_certificates(), limits=_LIMITS)) if self._wrap else None
        )
        return httpx2.AsyncClient(
            headers=self._headers,
            timeout=_TIMEOUT,
            limits=_LIMITS,
            verify=_certificates(),
            transport=transport,
            event_hooks=hooks,
        )

    async def _note_status(self, response: httpx2.Response) -> None:
        self.status = response.status_code

    async def list_tools(self) -> list[Any]:
        found: list[Any] = []
        cursor = None
        while True:
            page = await self._open_client().list_tools(cursor=cursor)
            found.extend(page.tools)
            cursor = page.next_cursor
            if not cursor:
                return found

    async def call(self, tool: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Call a tool, and return the server's answer, which may report a failure of the tool.

        RpcError: an error of the protocol (`is_lost`: the session is lost). Any error but TimeoutError: the session is
        lost.
        """
        from mcp import MCPError
        from mcp_types import REQUEST_TIMEOUT

        client = self._open_client()
        try:
            async with asyncio.timeout(timeout_s + 1.0):
                return await client.call_tool(tool, dict(arguments), read_timeout_seconds=timeout_s)
        except MCPError as error:
            # The code alone is not enough, because servers also use it for a key that they refuse.
            if error.code == REQUEST_TIMEOUT and "timed out" in error.message.lower():
                raise TimeoutError(error.message) from None
            raise RpcError(error.code, error.message) from error

    async def ping(self, *, timeout_s: float) -> bool:
        """True if the server answers in this session."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._open_client().send_ping()
        # boundary: the SDK and its transport raise errors of many types; each means that there is no answer
        except Exception:
            return False
        return True

    def _open_client(self) -> Client:
        if self._client is None or self._is_over.is_set():
            raise ConnectionError(f"the MCP session with {self._url} is over")
        return self._client

    def end(self) -> None:
        """Make the task that holds the session end it; don't wait for the end."""
        self._is_over.set()

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """End the session and wait until it has ended. Idempotent."""
        self.end()
        holder, self._holder = self._holder, None
        if holder is not None:
            await asyncio.wait({holder}, timeout=timeout_s)
            holder.cancel()
            await asyncio.wait({holder}, timeout=1.0)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Read the certificates once for all sessions, because reading takes 25 ms."""
    return httpx2.create_ssl_context()
