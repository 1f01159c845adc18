"""One session with an MCP server over streamable HTTP, opened again when it is lost. Used by `mcp_tool.py` only.

The SDK's client must be entered and left by the same task, while calls come from many: so a task of its own holds each
session, and calls go through it, side by side. Callers that find the session lost share one attempt to open another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from rayapp.core.errors import ConfigError, ToolUnavailableError, first_error
from rayapp.tools.http_patience import PatientTransport

log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CONNECT_TIMEOUT_S = 30.0
_LOST = ("connection", "session", "terminated", "closed", "cancelled")
_MAX_EVENT_BYTES = 16 << 20


class McpLink:
    """See the module.

    Args:
        name: the server's name, for messages.
        url: its endpoint.
        headers: sent with each request; they hold the key.
        reconnect_timeout_s: how long a lost server is tried again before callers are told.
        keeps_state: calls build on earlier ones of their session, so another session can't take its place once it has
            answered: its names would be gone, and the policy would be taught that it had used undefined ones.
    """

    def __init__(
        self,
        name: str,
        url: str,
        headers: Mapping[str, str],
        *,
        reconnect_timeout_s: float,
        keeps_state: bool = False,
    ) -> None:
        self._name = name
        self._keeps_state = keeps_state
        self._has_state = False
        self._url = url
        self._headers = dict(headers)
        self._reconnect_timeout_s = reconnect_timeout_s
        self._session: _Session | None = None
        self._opening: asyncio.Task[_Session] | None = None
        self._is_closed = False
        self.num_reconnects = 0

    @property
    def where(self) -> str:
        return f"MCP server {self._name!r} at {self._url}"

    async def list_tools(self) -> list[Any]:
        """The server's tools, on the first connection: no second try, so that a wrong address is told at once.

        Raises:
            ConfigError: the server can't be reached, refuses the key, or speaks no MCP.
        """
        try:
            if self._session is None or not self._session.is_open:
                self._session = await self._connect()
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await self._session.list_tools()
        except Exception as error:  # boundary: the SDK raises groups of many things
            raise ConfigError(
                f"{self.where} can't be used: {_describe(error)}. Start it (e.g. `rayapp mcp serve`), or mend its "
                "url and key in the file that mcp_servers_config_path names"
            ) from error

    async def call(self, tool: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The server's answer. A call whose session is lost under it is sent once more, so it may run twice.

        Where sessions keep state that holds only until the first answer.

        Raises:
            TimeoutError: no answer in time, though the server lives.
            ToolUnavailableError: the server is gone, or the session's state is.
            RpcError: it answered with an error of the protocol.
        """
        for attempt in range(2):
            session = await self._open_session()
            try:
                answer = await session.call(tool, arguments, timeout_s=timeout_s)
                self._has_state = self._keeps_state
                return answer
            except TimeoutError:
                self._has_state = self._keeps_state
                if not await session.ping():
                    self._drop(session)
                    raise ToolUnavailableError(f"{self.where} does not answer any more") from None
                raise
            except RpcError:
                self._has_state = self._keeps_state
                raise
            except Exception as error:  # boundary: as above; what is not an answer is a lost session
                self._drop(session)
                if attempt:
                    raise ToolUnavailableError(f"{self.where} is lost: {_describe(error)}") from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End the session. Idempotent."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening}, timeout=5.0)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _drop(self, session: _Session) -> None:
        session.end()
        if self._session is session:
            self._session = None

    async def _open_session(self) -> _Session:
        if self._is_closed:
            raise ToolUnavailableError(f"{self.where}: this link is closed")
        if self._session is not None and self._session.is_open:
            return self._session
        if self._has_state:
            raise ToolUnavailableError(f"{self.where}: the session of this trajectory is lost, and its state with it")
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._reopen(), name=f"reconnect to {self._url}")
        # Shield the attempt from this caller's cancellation: others wait for it too.
        return await asyncio.shield(self._opening)

    async def _reopen(self) -> _Session:
        ends_at = time.monotonic() + self._reconnect_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                self._session = await self._connect()
            except Exception as error:  # boundary: as above
                if time.monotonic() + pause_s >= ends_at:
                    raise ToolUnavailableError(
                        f"{self.where} could not be reached for {self._reconnect_timeout_s:g} s: {_describe(error)}"
                    ) from error
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            else:
                self.num_reconnects += 1
                log.warning("%s: connected anew", self.where)
                return self._session

    async def _connect(self) -> _Session:
        session = _Session(self._url, self._headers)
        await session.open()
        return session


class RpcError(Exception):
    """The server answered a call with an error of the protocol."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[RpcError], tuple[int, str]]:
        return type(self), (self.code, str(self))


class _Session:
    """One session, held by a task of its own."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = dict(headers)
        self._client: Any = None
        self._status = 0
        self._is_over = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._client is not None and not self._is_over.is_set()

    async def open(self) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready), name=f"MCP session {self._url}")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await ready
        except BaseException:
            await self.close()
            raise

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
        timeout = httpx2.Timeout(30.0, read=None, pool=None)
        hooks: Any = {"response": [self._note_status]}
        patient = PatientTransport(httpx2.AsyncHTTPTransport(limits=limits))
        http = httpx2.AsyncClient(headers=self._headers, timeout=timeout, transport=patient, event_hooks=hooks)
        try:
            transport = streamable_http_client(self._url, http_client=http, max_sse_event_size=_MAX_EVENT_BYTES)
            # `legacy`: the servers in question keep sessions; the newer protocol's probe has none.
            async with http, Client(transport, mode="legacy") as client:
                self._client = client
                ready.set_result(None)
                await self._is_over.wait()
        except Exception as error:  # boundary: the SDK raises groups of many things; told to whoever waits
            if not ready.done():
                # Use the HTTP status: of a refused key the SDK says only that there was an error.
                refused = ConnectionError(f"it answered with HTTP {self._status}") if self._status >= 400 else None
                ready.set_exception(refused or first_error(error))
            else:
                log.warning("the session with %s ended: %s", self._url, _describe(error))
        finally:
            self._client = None
            if not ready.done():
                ready.cancel()

    async def _note_status(self, response: Any) -> None:
        self._status = int(response.status_code)

    async def list_tools(self) -> list[Any]:
        found: list[Any] = []
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            found.extend(page.tools)
            cursor = page.next_cursor
            if not cursor:
                return found

    async def call(self, tool: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        client = self._client
        if client is None:
            raise ConnectionError("the session is over")
        try:
            async with asyncio.timeout(timeout_s + 1.0):
                return await client.call_tool(tool, dict(arguments), read_timeout_seconds=timeout_s)
        except MCPError as error:
            text = str(error.message)
            if "timed out" in text.lower():
                raise TimeoutError(text) from None
            if any(word in text.lower() for word in _LOST):
                raise
            raise RpcError(error.code, text) from error

    async def ping(self) -> bool:
        if self._client is None:
            return False
        try:
            async with asyncio.timeout(5.0):
                await self._client.send_ping()
        except Exception:  # boundary: no answer is the answer
            return False
        return True

    def end(self) -> None:
        """Tell the holding task to leave the session; it does so by itself."""
        self._is_over.set()

    async def close(self) -> None:
        self.end()
        if self._holder is not None:
            await asyncio.wait({self._holder}, timeout=5.0)
            self._holder.cancel()
            await asyncio.wait({self._holder}, timeout=1.0)


def _describe(error: BaseException) -> str:
    cause = first_error(error)
    if isinstance(cause, TimeoutError) and not str(cause):
        return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
    return f"{type(cause).__name__}: {cause}"[:400]
