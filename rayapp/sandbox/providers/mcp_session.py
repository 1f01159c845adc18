"""One session with an MCP server, which binds one sandbox there. Called by `mcp.py`.

The SDK's client must be entered and left by the same task, while leases begin and end in different ones: so a task of
its own holds the session, and others call through it.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Mapping
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client

from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxUnavailableError,
    first_error,
)

_AUTH, _CREATE, _TIMEOUT = -32001, -32002, -32005
"""Codes of OpenKruise's server, besides JSON-RPC's own."""
_LOST = ("connection", "session", "not found", "terminated", "closed")


class McpSession:
    """An open session. `open` makes one, `close` ends it.

    Args:
        url: of the server.
        headers: the key, and what the sandbox shall be.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = dict(headers)
        self._client: Client | None = None
        self._is_over = asyncio.Event()
        self._status = 0
        self._holder: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        return self._holder is not None and not self._holder.done() and not self._is_over.is_set()

    async def open(self, *, timeout_s: float) -> None:
        """Connect and shake hands.

        Raises:
            SandboxConfigError: the server refuses the key.
            SandboxUnavailableError: it can't be reached, or speaks no MCP.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(ready), name=f"MCP session {self._url}")
        try:
            async with asyncio.timeout(timeout_s):
                await ready
        except TimeoutError:
            await self.close(timeout_s=1.0)
            raise SandboxDeadlineError(f"mcp: {self._url} did not answer within {timeout_s:g} s") from None
        except BaseException:
            await self.close(timeout_s=1.0)
            raise

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        hooks = {"response": [self._note_status]}
        limit = httpx2.Timeout(30.0, read=None)
        http = httpx2.AsyncClient(headers=self._headers, timeout=limit, event_hooks=hooks, verify=_certificates())
        try:
            # `legacy`: the servers in question keep sessions, and the newer protocol's probe has none.
            async with http, Client(streamable_http_client(self._url, http_client=http), mode="legacy") as client:
                self._client = client
                ready.set_result(None)
                await self._is_over.wait()
        except (
            Exception
        ) as error:  # boundary: the SDK raises groups of many things; said to whoever waits or calls next
            if not ready.done():
                ready.set_exception(_open_error(first_error(error), self._url, self._status))
        finally:
            self._client = None
            if not ready.done():
                ready.cancel()

    async def _note_status(self, response: httpx2.Response) -> None:
        """The SDK raises one error for every status, and a wrong key must be told from a server that is busy."""
        self._status = response.status_code

    async def call(self, tool: str, arguments: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Call a tool. Returns its structured answer.

        Raises:
            SandboxError: it did not answer, or answered that it could not.
        """
        client = self._client
        if client is None or not self.is_open:
            raise SandboxGoneError(f"mcp: the session with {self._url} is over")
        try:
            answer = await client.call_tool(tool, dict(arguments), read_timeout_seconds=timeout_s)
        except Exception as error:  # boundary: the SDK and its transport; all mapped
            raise _call_error(first_error(error), tool) from error
        texts = [str(getattr(part, "text", "")) for part in answer.content]
        if answer.is_error:
            raise _tool_error(" ".join(texts), tool)
        if not isinstance(answer.structured_content, dict):
            raise SandboxProtocolError(f"mcp {tool}: no structured answer but {' '.join(texts)[:200]!r}")
        return answer.structured_content

    async def ping(self, *, timeout_s: float) -> bool:
        """True if the server answers in this session."""
        if self._client is None or not self.is_open:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await self._client.send_ping()
        except Exception:  # boundary: as above; no answer is the answer
            return False
        return True

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """End the session. Idempotent."""
        self._is_over.set()
        holder, self._holder = self._holder, None
        if holder is not None:
            await asyncio.wait({holder}, timeout=timeout_s)
            holder.cancel()
            await asyncio.wait({holder}, timeout=1.0)


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Whom to trust, read once: reading them takes 25 ms, and there is a client for every sandbox."""
    return httpx2.create_ssl_context()


def _open_error(error: BaseException, url: str, status: int) -> SandboxError:
    text = f"mcp: {url}: status {status}: {type(error).__name__}: {error}"[:600]
    if status in (401, 403) or getattr(error, "code", None) == _AUTH:
        return SandboxConfigError(f"{text}. Check the key: sandbox.providers[].api_key_env and api_key_header")
    return SandboxUnavailableError(text)


def _call_error(error: BaseException, tool: str) -> SandboxError:
    text = f"mcp {tool}: {type(error).__name__}: {error}"[:600]
    code = getattr(getattr(error, "error", error), "code", None)
    if code == _AUTH:
        return SandboxConfigError(text)
    if code == _CREATE:
        return SandboxUnavailableError(text)
    if code == _TIMEOUT or isinstance(error, TimeoutError) or "timed out" in text.lower():
        return SandboxDeadlineError(text)
    is_lost = not isinstance(error, MCPError) or any(word in text.lower() for word in _LOST)
    return SandboxGoneError(text) if is_lost else SandboxProtocolError(text)


def _tool_error(text: str, tool: str) -> SandboxError:
    """Of a tool that says it failed: these servers report failed sandboxes and failed code alike, and code that fails
    comes back by our own report, so what is left is the sandbox."""
    said = f"mcp {tool}: {text}"[:600]
    if "unknown tool" in text.lower():
        return SandboxConfigError(f"{said}. The server needs the tools run_code, run_code_once and run_command")
    if "template" in text.lower():
        return SandboxConfigError(f"{said}. Check sandbox.providers[].template and the task's")
    if "not found" in text.lower():
        return SandboxGoneError(said)
    return SandboxProtocolError(said)
