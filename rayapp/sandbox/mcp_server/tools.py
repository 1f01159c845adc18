"""run_code, run_code_once and run_command, as OpenKruise's MCP server offers them. Registered by `app.py`.

Headers choose the sandbox: X-Template, X-Sandbox-TTL (seconds), X-Execution-Timeout (seconds). What the code does is
data in the answer; a sandbox that fails is an error of the protocol, with that server's codes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from mcp import MCPError
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from rayapp.core.errors import SandboxDeadlineError, SandboxError, SandboxGoneError, SandboxUnavailableError
from rayapp.core.types import ExecResult, SandboxSpec, StopCause
from rayapp.sandbox.mcp_server.results import code_answer, command_answer, with_last_value
from rayapp.sandbox.mcp_server.sessions import Sessions

CREATE_FAILED, EXECUTION_FAILED, TIMED_OUT = -32002, -32003, -32005
_MARGIN_CHARS = 2000
_NAME = re.compile(r"[A-Za-z_]\w*")
_Context = Context[Any, Any]
Code = Annotated[str, Field(description="Source code; print what you want to see")]
Language = Annotated[str, Field(description="python")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one client may ask for."""

    execution_timeout_s: float = 60.0
    """Of an execution whose client does not say."""
    max_execution_timeout_s: float = 600.0
    sandbox_ttl_s: float = 300.0
    """Of a session's sandbox whose client does not say."""
    max_sandbox_ttl_s: float = 3600.0
    max_output_bytes: int = 65536
    """Of stdout and of stderr; more stops the code."""
    passes_templates: bool = False
    """Whether X-Template reaches the provider; the local one has no templates, and ignores it."""


class SandboxTools:
    """The three tools. Methods' signatures and docstrings are what clients and policies see."""

    def __init__(self, sessions: Sessions, limits: ServerLimits) -> None:
        self._sessions = sessions
        self._limits = limits

    async def run_code(self, code: Code, ctx: _Context, language: Language = "python") -> dict[str, Any]:
        """Run code in this session's interpreter. Names and files stay from one call to the next."""
        _check_language(language)
        asked = self._asked(ctx)
        shown, mark = with_last_value(code)
        async with self._failures(asked, session_id := _session_id(ctx)):
            sandbox = await self._sessions.sandbox(session_id, asked.spec, ttl_s=asked.ttl_s)
            result = await sandbox.run_code(
                shown, timeout_s=asked.timeout_s, stateful=True, max_output_bytes=self._limits.max_output_bytes
            )
        _check_time(result, asked.timeout_s)
        return {**code_answer(result, sandbox.id, mark), "execution_count": self._sessions.count(session_id)}

    async def run_code_once(self, code: Code, ctx: _Context, language: Language = "python") -> dict[str, Any]:
        """Run code in a new sandbox that ends with it, and return what it printed."""
        _check_language(language)
        asked = self._asked(ctx)
        shown, mark = with_last_value(code)
        async with self._failures(asked, ""), self._sessions.once(asked.spec) as sandbox:
            result = await sandbox.run_code(
                shown, timeout_s=asked.timeout_s, max_output_bytes=self._limits.max_output_bytes
            )
        _check_time(result, asked.timeout_s)
        return code_answer(result, sandbox.id, mark)

    async def run_command(
        self,
        cmd: Annotated[str, Field(description="Shell command")],
        ctx: _Context,
        envs: dict[str, str] | None = None,
        cwd: str | None = None,
    ) -> dict[str, Any]:
        """Run a shell command in this session's sandbox."""
        asked = self._asked(ctx)
        argv = ["/bin/sh", "-c", _shell_text(cmd, envs or {}, cwd)]
        async with self._failures(asked, session_id := _session_id(ctx)):
            sandbox = await self._sessions.sandbox(session_id, asked.spec, ttl_s=asked.ttl_s)
            result = await sandbox.run_command(
                argv, timeout_s=asked.timeout_s, max_output_bytes=self._limits.max_output_bytes
            )
        _check_time(result, asked.timeout_s)
        return command_answer(result, sandbox.id)

    def _asked(self, ctx: _Context) -> _Asked:
        headers = {key.lower(): value for key, value in (ctx.headers or {}).items()}
        limits = self._limits
        timeout_s = _seconds(headers, "x-execution-timeout", limits.execution_timeout_s, limits.max_execution_timeout_s)
        ttl_s = _seconds(headers, "x-sandbox-ttl", limits.sandbox_ttl_s, limits.max_sandbox_ttl_s)
        template = headers.get("x-template", "") if limits.passes_templates else ""
        return _Asked(timeout_s=timeout_s, ttl_s=ttl_s, spec=SandboxSpec(template=template))

    @asynccontextmanager
    async def _failures(self, asked: _Asked, session_id: str) -> AsyncIterator[None]:
        """Sandbox failures as errors of the protocol."""
        try:
            yield
        except SandboxGoneError as error:
            if not session_id:
                raise MCPError(EXECUTION_FAILED, f"the sandbox died: {error}") from error
            await self._sessions.lose(session_id)
            raise ToolError(f"sandbox not found: {error}") from error
        except SandboxDeadlineError as error:
            await self._sessions.lose(session_id)
            raise MCPError(TIMED_OUT, f"no answer from the sandbox: {error}") from error
        except SandboxUnavailableError as error:
            raise MCPError(CREATE_FAILED, f"no sandbox could be had: {error}") from error
        except SandboxError as error:
            raise MCPError(EXECUTION_FAILED, f"the sandbox failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a call's headers ask for."""

    timeout_s: float
    ttl_s: float
    spec: SandboxSpec


def _seconds(headers: Mapping[str, str], name: str, default: float, most: float) -> float:
    text = headers.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ToolError(f"header {name} must be a number of seconds above 0, got {text!r}")
    return min(value, most)


def _session_id(ctx: _Context) -> str:
    session_id = next((v for k, v in (ctx.headers or {}).items() if k.lower() == "mcp-session-id"), "")
    if not session_id:
        raise ToolError("this tool needs an MCP session, and the client keeps none; use run_code_once")
    return session_id


def _check_language(language: str) -> None:
    if language.lower() not in ("python", "python3", "py"):
        raise ToolError(f"language {language!r} is not offered here; there is: python")


def _check_time(result: ExecResult, timeout_s: float) -> None:
    if result.stopped_for is StopCause.TIMEOUT:
        said = (result.stdout + result.stderr)[-_MARGIN_CHARS:]
        raise MCPError(TIMED_OUT, f"execution timed out after {timeout_s:g} s" + (f"; it said: {said}" if said else ""))


def _shell_text(cmd: str, envs: Mapping[str, str], cwd: str | None) -> str:
    if wrong := [name for name in envs if not _NAME.fullmatch(name)]:
        raise ToolError(f"envs: {wrong[0]!r} is no name of an environment variable")
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in envs.items())
    return exports + (f"cd {shlex.quote(cwd)} && " if cwd else "") + cmd
