"""Tools of an MCP server as tools of the policy. Made by `loading.py` from an entry with `type: mcp`.

All tools of a server share its rate limit and, by default, one session per worker. A server that runs code answers with
structure (stdout, stderr, error); the policy reads it as a terminal would show it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from rayapp.core.errors import ToolUnavailableError
from rayapp.core.types import ExecOutcome, ExecRecord
from rayapp.sandbox.pool.bucket import TokenBucket
from rayapp.sandbox.providers.mcp_session import RpcError
from rayapp.tools.base import ToolFailedError, ToolOutput, ToolSchema
from rayapp.tools.config import McpToolConfig
from rayapp.tools.mcp_link import McpLink

_INFRASTRUCTURE = (-32001, -32002, -32003)
"""Error codes of sandbox servers that say nothing about the policy: key refused, no sandbox, sandbox failed."""
_CODE_TIMEOUT = -32005
_MARGIN_S = 20.0
"""Seconds of the loop's deadline beyond the tool's own ones: it only catches a tool that hangs."""


class McpTool:
    """See `rayapp.tools.base.Tool`.

    Args:
        info: the server's description of the tool.
        connect: makes a link to the server.
        shared: the worker's link.
        bucket: the server's rate limit.
    """

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
        # The call, the wait for the rate limit, and one reconnection before and one during the call.
        self.timeout_s = config.timeout + config.max_wait + 2 * config.reconnect_timeout + _MARGIN_S

    async def create(self, kwargs: Mapping[str, Any]) -> McpLink:
        """The link that this trajectory's calls go through; opened by the first call."""
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
        return ToolOutput(text=text, waited_s=waited_s, execs=ran)

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
                    f"{self._shared.where}: rate_limit {self._config.rate_limit:g}/s left a call waiting for more than "
                    f"{self._config.max_wait:g} s. Raise rate_limit or max_wait"
                )
            await asyncio.sleep(max(0.001, self._bucket.wait_s()))
        return time.monotonic() - started

    def _explained(self, error: RpcError, link: McpLink) -> Exception:
        if error.code in _INFRASTRUCTURE:
            return ToolUnavailableError(f"{link.where}: {self.schema.name}: {error} (code {error.code})")
        is_late = error.code == _CODE_TIMEOUT or "timed out" in str(error).lower()
        return ToolFailedError(str(error), "timeout" if is_late else "failed")


def answer_text(answer: Any) -> str:
    """An MCP answer as text for the policy."""
    content = answer.structured_content
    if isinstance(content, dict) and isinstance(content.get("logs"), dict):
        return _code_text(content)
    if isinstance(content, dict) and isinstance(content.get("stdout"), str) and "exit_code" in content:
        return _command_text(content)
    return "\n".join(str(part.text) for part in answer.content if getattr(part, "text", None))


def _execution(answer: Any, started_at_s: float, duration_s: float) -> tuple[ExecRecord, ...]:
    """The execution that a server which runs code reports; empty for any other server."""
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
    """The schema without the titles that generators add: they cost the policy tokens and tell it nothing."""
    found = {key: value for key, value in schema.items() if key != "title"}
    properties = found.get("properties")
    if isinstance(properties, Mapping):
        found["properties"] = {
            name: {key: value for key, value in part.items() if key != "title"} if isinstance(part, Mapping) else part
            for name, part in properties.items()
        }
    return found
