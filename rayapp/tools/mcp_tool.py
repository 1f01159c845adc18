"""Makes the tools of an MCP server tools of the policy, for an entry with `type: mcp`.

All tools of a server share its rate limit and, by default, one session per worker. If it is lost, its callers share one
attempt to open another. The HTTP transport waits for a busy server, because the MCP SDK raises the same error for all
refusals.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import httpx2

from rayapp.core.errors import ConfigError, ToolUnavailableError, first_error
from rayapp.core.http import TokenBucket, pauses_s, retry_after_s
from rayapp.core.types import ExecOutcome, ExecRecord
from rayapp.tools.base import ToolFailedError, ToolOutput, ToolSchema
from rayapp.tools.config import McpToolConfig
from rayapp.tools.mcp_session import McpSession, RpcError

_BUSY = (429, 503)
_FIRST_RETRY_PAUSE_S, _LONGEST_RETRY_PAUSE_S = 0.5, 30.0


class PatientTransport(httpx2.AsyncBaseTransport):
    """HTTP transport that repeats requests answered with 429 or 503, which the server has not executed, for at most
    `max_wait_s` each; then the refusal is returned."""

    def __init__(
        self,
        inner: httpx2.AsyncBaseTransport,
        *,
        max_wait_s: float = 60.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._inner = inner
        self._max_wait_s = max_wait_s
        self._sleep = sleep

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        left_s, pauses = self._max_wait_s, pauses_s(_FIRST_RETRY_PAUSE_S, _LONGEST_RETRY_PAUSE_S)
        while True:
            response = await self._inner.handle_async_request(request)
            wait_s = _pause_s(response, next(pauses))
            if response.status_code not in _BUSY or wait_s > left_s:
                return response
            await response.aclose()
            await self._sleep(wait_s)
            left_s -= wait_s

    async def aclose(self) -> None:
        await self._inner.aclose()


def _pause_s(response: httpx2.Response, default_s: float) -> float:
    asked_s = retry_after_s(response.headers.get("retry-after"))
    return default_s if asked_s is None else min(max(asked_s, 0.05), _LONGEST_RETRY_PAUSE_S)


log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_CONNECT_TIMEOUT_S, _PING_TIMEOUT_S = 30.0, 5.0


@dataclass(slots=True, eq=False, repr=False)
class McpLink:
    """Connection to an MCP server. It opens a new session if the current one is lost."""

    name: str  # for messages
    url: str
    headers: Mapping[str, str]  # of every request, including the key
    _: KW_ONLY
    reconnect_timeout_s: float  # to reach a lost server, before a call fails
    # Calls depend on earlier calls of their session. One that is lost after its first answer is not replaced: the
    # policy would be trained on errors about variables that it had defined.
    keeps_state: bool = False
    _has_state: bool = False
    _session: McpSession | None = None
    _opening: asyncio.Task[McpSession] | None = None
    _is_closed: bool = False

    @property
    def where(self) -> str:
        return f"MCP server {self.name!r} at {self.url}"

    async def list_tools(self) -> list[Any]:
        """Return the server's tools. It tries to connect only once, so that a wrong address is reported."""
        try:
            if self._session is None or not self._session.is_open:
                self._session = await self._connect()
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await self._session.list_tools()
        except Exception as error:  # boundary: the SDK raises exception groups of many types
            raise ConfigError(
                f"{self.where} can't be used: {_describe(error)}. Start it (e.g. `rayapp sandbox serve`), or correct "
                "its url and key in the file that mcp_servers_config_path names"
            ) from error

    async def call(self, tool: str, arguments: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Call a tool and return the server's answer.

        If the session is lost, the call is sent once more, so it may run twice; with state only if the session has not
        answered any call. ToolUnavailableError: no server, or its state is lost.
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
            # boundary: every error of the SDK that is not an answer means that the session is lost
            except Exception as error:
                if isinstance(error, RpcError) and not error.is_lost:
                    self._has_state = self.keeps_state
                    raise
                self._drop(session)
                if attempt:
                    raise ToolUnavailableError(f"the connection to {self.where} is lost: {_describe(error)}") from error
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
            raise ToolUnavailableError(f"{self.where}: the connection was closed")
        if self._session is not None and self._session.is_open:
            return self._session
        if self._has_state:
            raise ToolUnavailableError(
                f"{self.where}: this trajectory's MCP session and its state on the server are lost"
            )
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._reopen(), name=f"reconnect to {self.url}")
        # The attempt is shielded from this caller's cancellation, because other callers also wait for it.
        return await asyncio.shield(self._opening)

    async def _reopen(self) -> McpSession:
        ends_at = time.monotonic() + self.reconnect_timeout_s
        pauses = pauses_s(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            try:
                self._session = await self._connect()
            except Exception as error:  # boundary: the SDK raises exception groups of many types
                if time.monotonic() + (pause_s := next(pauses)) >= ends_at:
                    raise ToolUnavailableError(
                        f"{self.where} could not be reached for {self.reconnect_timeout_s:g} s: {_describe(error)}"
                    ) from error
                await asyncio.sleep(pause_s)
            else:
                log.warning("%s: connected anew", self.where)
                return self._session

    async def _connect(self) -> McpSession:
        session = McpSession(self.url, self.headers, wrap=PatientTransport)
        try:
            await session.open(timeout_s=_CONNECT_TIMEOUT_S)
        except Exception as error:  # boundary: the SDK raises exception groups of many types
            if session.status >= 400:
                # The HTTP status shows that the server refused the key; the SDK's error does not.
                raise ConnectionError(f"the server answered with HTTP status {session.status}") from error
            raise
        return session


def _describe(error: BaseException) -> str:
    cause = first_error(error)
    if isinstance(cause, TimeoutError) and not str(cause):
        return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
    return f"{type(cause).__name__}: {cause}"[:400]


_INFRASTRUCTURE = (-32001, -32002, -32003)  # codes of sandbox servers: key refused, no sandbox, sandbox failed
_CODE_TIMEOUT = -32005
_MARGIN_S = 20.0  # of the agent loop's deadline over the tool's own, so that it ends only a tool that hangs


class McpTool:
    """One tool of an MCP server. `connect` makes a link for one trajectory, `shared` is that of the worker, `bucket`
    the rate limit of the server."""

    def __init__(
        self, info: Any, config: McpToolConfig, *, connect: Callable[[], McpLink], shared: McpLink, bucket: TokenBucket
    ) -> None:
        self.schema = ToolSchema(
            name=info.name, description=info.description or "", parameters=_plain_schema(info.input_schema)
        )
        self._config = config
        self._connect = connect
        self._shared = shared
        self._bucket = bucket
        # The deadline allows for the call, the wait for the rate limit, and two reconnections: one before and one
        # during the call.
        self.timeout_s = config.timeout + config.max_wait + 2 * config.reconnect_timeout + _MARGIN_S

    async def create(self, kwargs: Mapping[str, Any]) -> McpLink:
        """Return the link for this trajectory's calls. The first call opens the link's session."""
        return self._connect() if self._config.session == "trajectory" else self._shared

    async def execute(self, state: McpLink, arguments: Mapping[str, Any]) -> ToolOutput:
        waited_s = await self._wait_for_turn()
        started_at_s, started = time.time(), time.monotonic()
        try:
            answer = await state.call(self.schema.name, arguments, timeout_s=self._config.timeout)
        except TimeoutError:
            raise ToolFailedError(
                f"{self.schema.name} did not finish within {self._config.timeout:g} s", "timeout"
            ) from None
        except RpcError as error:
            raise self._explained(error, state) from error
        text = answer_text(answer)
        if answer.is_error:
            raise ToolFailedError(text or f"{self.schema.name} failed")
        ran = _execution(answer, started_at_s, time.monotonic() - started)
        return ToolOutput(text=text, waited_s=waited_s, execs=ran, pictures=self._pictures(answer))

    def _pictures(self, answer: Any) -> tuple[bytes, ...]:
        parts = [part for part in answer.content if getattr(part, "type", "") == "image"]
        try:
            return tuple(base64.b64decode(part.data, validate=True) for part in parts)
        except ValueError as error:
            raise ToolFailedError(f"{self.schema.name}: a picture's data is not base64: {error}") from None

    async def reward(self, state: McpLink) -> float | None:
        return None

    async def release(self, state: McpLink) -> None:
        if state is not self._shared:
            await state.close()

    async def _wait_for_turn(self) -> float:
        started = time.monotonic()
        while not self._bucket.take():
            if time.monotonic() - started > self._config.max_wait:
                raise ToolUnavailableError(
                    f"{self._shared.where}: a call waited for more than max_wait {self._config.max_wait:g} s, because "
                    f"rate_limit allows {self._config.rate_limit:g} calls/s. Raise rate_limit or max_wait"
                )
            await asyncio.sleep(max(0.001, self._bucket.wait_s()))
        return time.monotonic() - started

    def _explained(self, error: RpcError, link: McpLink) -> Exception:
        if error.code in _INFRASTRUCTURE:
            return ToolUnavailableError(f"{link.where}: {self.schema.name}: {error} (code {error.code})")
        is_late = error.code == _CODE_TIMEOUT or "timed out" in str(error).lower()
        return ToolFailedError(str(error), "timeout" if is_late else "failed")


def answer_text(answer: Any) -> str:
    """Return a server's answer as text for the policy."""
    content = answer.structured_content
    if isinstance(content, dict) and isinstance(content.get("logs"), dict):
        return _code_text(content)
    if isinstance(content, dict) and isinstance(content.get("stdout"), str) and "exit_code" in content:
        return _command_text(content)
    return "\n".join(str(part.text) for part in answer.content if getattr(part, "text", None))


def _execution(answer: Any, started_at_s: float, duration_s: float) -> tuple[ExecRecord, ...]:
    """Return the execution's record, for an answer from a server that runs code."""
    content = answer.structured_content
    if not isinstance(content, dict) or not isinstance(content.get("sandbox_id"), str):
        return ()
    outcome = ExecOutcome.CODE_FAILED if content.get("error") or content.get("exit_code") else ExecOutcome.OK
    record = ExecRecord(
        sandbox_id=content["sandbox_id"],
        provider="mcp",
        outcome=outcome.value,
        started_at_s=started_at_s,
        duration_s=duration_s,
    )
    return (record,)


def _code_text(content: Mapping[str, Any]) -> str:
    logs, error = content["logs"], content.get("error")
    parts = ["".join(map(str, logs.get("stdout") or ())), "".join(map(str, logs.get("stderr") or ()))]
    parts += [str(result["text"]) for result in content.get("results") or () if result.get("text")]
    if isinstance(error, dict):
        said = f"{error.get('name')}: {error.get('value')}"
        parts.append(str(error.get("traceback") or said))
    return "\n".join(part.rstrip("\n") for part in parts if part.strip())


def _command_text(content: Mapping[str, Any]) -> str:
    parts = [content["stdout"], str(content.get("stderr") or ""), str(content.get("error") or "")]
    if content["exit_code"]:
        parts.append(f"exit code {content['exit_code']}")
    return "\n".join(part.rstrip("\n") for part in parts if part.strip())


def _plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without titles, which generators of schemas add and which cost tokens."""
    found = {key: value for key, value in schema.items() if key != "title"}
    properties = found.get("properties")
    if isinstance(properties, Mapping):
        found["properties"] = {
            name: {key: value for key, value in part.items() if key != "title"} if isinstance(part, Mapping) else part
            for name, part in properties.items()
        }
    return found
