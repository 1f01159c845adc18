"""Sandboxes of a remote MCP server with the tools run_code and run_command.

    McpProvider (in the holder's process) -> McpSession = one sandbox at the server -> McpChannel -> RemoteSandbox

A session is a sandbox's only handle, and MCP can't list, extend or end sandboxes. So the process that uses the sandbox
opens the session, and the pool only counts. A sandbox ends after the time to live that its session began with.
"""

from __future__ import annotations

import asyncio
import base64
import math
import shlex
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rayapp.config.sandbox import McpConfig
from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxUnavailableError,
    first_error,
)
from rayapp.core.types import ExecResult, SandboxSpec
from rayapp.extras.providers.remote import RemoteSandbox, Sink, run_session
from rayapp.sandbox.leases import ANSWER_WITHIN_S, Connection
from rayapp.sandbox.verdict.program import command_of
from rayapp.tools.mcp_session import McpSession, RpcError

_AUTH, _CREATE, _TIMEOUT = -32001, -32002, -32005  # Codes of OpenKruise's server that JSON-RPC does not define.
_CHUNK_BYTES = 48_000


class McpProvider:
    """Provider that makes a sandbox by opening a session. `list` and `kill` know only this object's sandboxes."""

    name = "mcp"

    def __init__(self, config: McpConfig, *, api_key: str, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self._config = config
        self._answer_within_s = answer_within_s
        self._api_key = api_key
        self._living: dict[str, tuple[McpChannel, dict[str, str]]] = {}

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> RemoteSandbox:
        session = await _opened(McpSession(self._config.url, self._headers(spec, ttl_s)), self._config.url, timeout_s)
        sandbox_id = f"mcp-{uuid.uuid4().hex}"
        channel = McpChannel(sandbox_id, session, self._config, spec, time.monotonic() + ttl_s, self._ended)
        self._living[sandbox_id] = (channel, dict(labels))
        return self._sandbox(Connection(sandbox_id=sandbox_id), channel, spec)

    def attach(self, connection: Connection, spec: SandboxSpec) -> RemoteSandbox:
        """Return a sandbox that this object created: sessions can't be passed on to other processes."""
        known = self._living.get(connection.sandbox_id)
        if known is None:
            raise SandboxGoneError(
                f"sandbox {connection.sandbox_id} has ended, or belongs to another process: MCP sessions can't be "
                "passed on"
            )
        return self._sandbox(connection, known[0], spec)

    def _sandbox(self, connection: Connection, channel: McpChannel, spec: SandboxSpec) -> RemoteSandbox:
        return RemoteSandbox(self.name, connection, channel, spec, margin_s=self._answer_within_s)

    def _headers(self, spec: SandboxSpec, ttl_s: float) -> dict[str, str]:
        headers = {
            "X-Template": self._config.template_of(spec.template) or self._config.template,
            "X-Sandbox-TTL": str(math.ceil(ttl_s)),
            "X-Execution-Timeout": str(math.ceil(ttl_s)),
        }
        keys = {"E2B-API-KEY": self._api_key, "Authorization": f"Bearer {self._api_key}"}
        return headers | (keys if self._api_key else {})

    async def list(self, labels: Mapping[str, str], *, timeout_s: float = 30.0) -> AsyncIterator[str]:
        for sandbox_id, (_, own) in tuple(self._living.items()):
            if labels.items() <= own.items():
                yield sandbox_id

    async def kill(self, sandbox_id: str, *, timeout_s: float = 10.0) -> None:
        if sandbox_id in self._living:
            await self._living[sandbox_id][0].kill(timeout_s=timeout_s)

    async def close(self) -> None:
        await asyncio.gather(*(channel.kill(timeout_s=5.0) for channel, _ in tuple(self._living.values())))

    def _ended(self, sandbox_id: str) -> None:
        self._living.pop(sandbox_id, None)


@dataclass(slots=True, eq=False, repr=False)
class McpChannel:
    """Data plane of one session's sandbox."""

    id: str
    session: McpSession
    config: McpConfig
    spec: SandboxSpec
    ends_at: float
    on_end: Callable[[str], None]
    _is_env_set: bool = False

    async def run_python(self, program: str, *, timeout_s: float, max_chars: int) -> str:
        command = await command_of(program, lambda path: self.write_file(path, program.encode(), timeout_s=timeout_s))
        return await self._command(command, timeout_s)

    async def _command(self, command: str, timeout_s: float) -> str:
        # Only `cmd` is passed, the one argument that every server has. The watcher sets the spec's environment
        # variables.
        answer = await self._call("run_command", {"cmd": command}, timeout_s=timeout_s)
        return _text(answer, "stdout", "run_command")

    async def run_session(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        async def run(text: str, out: Sink, err: Sink) -> str:
            await self._set_env(timeout_s)
            arguments = {"code": text, "language": "python"}
            answer = await self._call("run_code", arguments, timeout_s=timeout_s + 60.0)
            out(_logs(answer, "stdout"))
            err(_logs(answer, "stderr"))
            failed = answer.get("error")
            return f"{failed.get('name')}: {failed.get('value')}" if isinstance(failed, dict) else ""

        return await run_session("mcp", code, run, self.alive, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

    async def write_file(self, path: str, data: bytes, *, timeout_s: float) -> None:
        for start in range(0, max(1, len(data)), _CHUNK_BYTES):
            chunk = base64.b64encode(data[start : start + _CHUNK_BYTES]).decode()
            mode = "ab" if start else "wb"
            program = f"import base64; open({path!r}, {mode!r}).write(base64.b64decode({chunk!r})); print('written')"
            said = await self._command(f"python3 -I -c {shlex.quote(program)} 2>&1", timeout_s)
            if not said.rstrip().endswith("written"):
                raise OSError(f"sandbox {self.id}: {path!r} can't be written: {said.strip()[-200:]}")

    async def alive(self, *, timeout_s: float) -> bool:
        if time.monotonic() >= self.ends_at or not await self.session.ping(timeout_s=timeout_s):
            return False
        try:
            return "here" in await self._command("echo here", timeout_s)
        except SandboxError:
            return False

    async def extend(self, ttl_s: float, *, timeout_s: float) -> None:
        if time.monotonic() + ttl_s > self.ends_at + 1.0:
            raise SandboxConfigError(
                f"sandbox {self.id} can't live for another {ttl_s:.0f} s: it ends in "
                f"{self.ends_at - time.monotonic():.0f} s, and MCP has no call that extends it. Raise "
                "sandbox.lease_ttl_s"
            )

    async def kill(self, *, timeout_s: float) -> None:
        await self.session.close(timeout_s=timeout_s / 2)
        self.on_end(self.id)

    async def _call(self, tool: str, arguments: Mapping[str, object], *, timeout_s: float) -> dict[str, Any]:
        """Call a tool and return its structured answer. Raises SandboxError: it has none, or an error."""
        try:
            answer = await self.session.call(tool, arguments, timeout_s=timeout_s)
        except Exception as error:  # boundary: the SDK and its transport raise errors of many types
            raise _call_error(first_error(error), tool) from error
        said = " ".join(str(getattr(part, "text", "")) for part in answer.content)
        if answer.is_error:
            raise _tool_error(said, tool)
        if not isinstance(answer.structured_content, dict):
            raise SandboxProtocolError(f"MCP tool {tool}: the answer has no structured content: {said[:200]!r}")
        return answer.structured_content

    async def _set_env(self, timeout_s: float) -> None:
        """Set the spec's environment variables before code runs, because the tool has no argument for them."""
        if self.spec.env and not self._is_env_set:
            code = f"__import__('os').environ.update({dict(self.spec.env)!r})"
            await self._call("run_code", {"code": code, "language": "python"}, timeout_s=timeout_s)
            self._is_env_set = True


def _text(answer: Mapping[str, object], key: str, tool: str) -> str:
    text = answer.get(key)
    if not isinstance(text, str):
        raise SandboxProtocolError(f"MCP tool {tool}: the answer has no string {key!r}: {str(answer)[:200]}")
    return text


def _logs(answer: Mapping[str, object], stream: str) -> str:
    logs = answer.get("logs")
    parts = logs.get(stream) if isinstance(logs, dict) else None
    if not isinstance(parts, list):
        raise SandboxProtocolError(f"MCP server: the answer has no list `logs.{stream}`: {str(answer)[:200]}")
    return "".join(str(part) for part in parts)


async def _opened(session: McpSession, url: str, timeout_s: float) -> McpSession:
    """Open a session and return it. Raises SandboxError: SandboxConfigError if the server refuses the key."""
    try:
        await session.open(timeout_s=timeout_s)
    except TimeoutError:
        raise SandboxDeadlineError(f"MCP server {url} did not answer within {timeout_s:g} s") from None
    except Exception as error:  # boundary: the SDK may raise many types of errors; all are converted
        text = f"MCP server {url}: status {session.status}: {type(error).__name__}: {error}"[:600]
        if session.status in (401, 403) or getattr(error, "code", None) == _AUTH:
            cure = "Check the key: sandbox.providers[].api_key_env"
            raise SandboxConfigError(f"{text}. {cure}") from error
        raise SandboxUnavailableError(text) from error
    return session


def _call_error(error: BaseException, tool: str) -> SandboxError:
    text = f"MCP tool {tool}: {type(error).__name__}: {error}"[:600]
    code = error.code if isinstance(error, RpcError) else None
    if code == _AUTH:
        return SandboxConfigError(text)
    if code == _CREATE:
        return SandboxUnavailableError(text)
    if code == _TIMEOUT or isinstance(error, TimeoutError) or "timed out" in text.lower():
        return SandboxDeadlineError(text)
    is_lost = not isinstance(error, RpcError) or error.is_lost or "not found" in text.lower()
    return SandboxGoneError(text) if is_lost else SandboxProtocolError(text)


def _tool_error(text: str, tool: str) -> SandboxError:
    """Convert a tool's failure, which means a failed sandbox: rayapp's watcher catches failures of code."""
    said = f"MCP tool {tool}: {text}"[:600]
    if "unknown tool" in text.lower():
        return SandboxConfigError(f"{said}. The server needs the tools run_code and run_command")
    if "template" in text.lower():
        return SandboxConfigError(f"{said}. Check sandbox.providers[].template and the task's template")
    return SandboxGoneError(said) if "not found" in text.lower() else SandboxProtocolError(said)
