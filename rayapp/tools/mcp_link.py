"""A session with an MCP server that is opened again when it is lost. Used by `mcp_tool.py` only.

Calls go through it side by side. Callers that find the session lost share one attempt to open another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rayapp.core.errors import ConfigError, ToolUnavailableError, first_error
from rayapp.sandbox.providers.mcp_session import McpSession, RpcError
from rayapp.tools.http_patience import PatientTransport

log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CONNECT_TIMEOUT_S, _PING_TIMEOUT_S = 30.0, 5.0


@dataclass(slots=True, eq=False, repr=False)
class McpLink:
    """See the module."""

    name: str
    """The server's, for messages."""
    url: str
    """Its endpoint."""
    headers: Mapping[str, str]
    """Sent with each request; they hold the key."""
    _: KW_ONLY
    reconnect_timeout_s: float
    """How long a lost server is tried again before callers are told."""
    keeps_state: bool = False
    """Calls build on earlier ones of their session, so another session can't take its place once it has answered: its
    names would be gone, and the policy would be taught that it had used undefined ones."""
    _has_state: bool = False
    _session: McpSession | None = None
    _opening: asyncio.Task[McpSession] | None = None
    _is_closed: bool = False

    @property
    def where(self) -> str:
        return f"MCP server {self.name!r} at {self.url}"

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
                self._has_state = self.keeps_state
                return answer
            except TimeoutError:
                self._has_state = self.keeps_state
                if not await session.ping(timeout_s=_PING_TIMEOUT_S):
                    self._drop(session)
                    raise ToolUnavailableError(f"{self.where} does not answer any more") from None
                raise
            except Exception as error:  # boundary: as above; what is not an answer is a lost session
                if isinstance(error, RpcError) and not error.is_lost:
                    self._has_state = self.keeps_state
                    raise
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

    def _drop(self, session: McpSession) -> None:
        session.end()
        if self._session is session:
            self._session = None

    async def _open_session(self) -> McpSession:
        if self._is_closed:
            raise ToolUnavailableError(f"{self.where}: this link is closed")
        if self._session is not None and self._session.is_open:
            return self._session
        if self._has_state:
            raise ToolUnavailableError(f"{self.where}: the session of this trajectory is lost, and its state with it")
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._reopen(), name=f"reconnect to {self.url}")
        # Shield the attempt from this caller's cancellation: others wait for it too.
        return await asyncio.shield(self._opening)

    async def _reopen(self) -> McpSession:
        ends_at = time.monotonic() + self.reconnect_timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                self._session = await self._connect()
            except Exception as error:  # boundary: as above
                if time.monotonic() + pause_s >= ends_at:
                    raise ToolUnavailableError(
                        f"{self.where} could not be reached for {self.reconnect_timeout_s:g} s: {_describe(error)}"
                    ) from error
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            else:
                log.warning("%s: connected anew", self.where)
                return self._session

    async def _connect(self) -> McpSession:
        session = McpSession(self.url, self.headers, wrap=PatientTransport)
        try:
            await session.open(timeout_s=_CONNECT_TIMEOUT_S)
        except Exception as error:  # boundary: as above
            if session.status >= 400:
                # The SDK says of a refused key only that there was an error.
                raise ConnectionError(f"it answered with HTTP {session.status}") from error
            raise
        return session


def _describe(error: BaseException) -> str:
    cause = first_error(error)
    if isinstance(cause, TimeoutError) and not str(cause):
        return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
    return f"{type(cause).__name__}: {cause}"[:400]
