"""The tools run_code, run_code_once and run_command, with the interface of OpenKruise's MCP server.

Request headers choose the sandbox: X-Template, X-Sandbox-TTL (seconds), X-Execution-Timeout (seconds). Output and
errors of the code are data in the answer. A failed sandbox is an error of the protocol, with the codes of OpenKruise's
server. Answers:

run_code, run_code_once: {logs: {stdout, stderr}, results: [{text, is_main_result}], error?, sandbox_id, …}
run_command:             {stdout, stderr, exit_code, sandbox_id, error?}
"""

from __future__ import annotations

import ast
import re
import shlex
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from mcp import MCPError
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from rayapp.core.errors import SandboxDeadlineError, SandboxError, SandboxGoneError, SandboxUnavailableError
from rayapp.core.syntax import parse
from rayapp.core.types import ExecOutcome, ExecResult, SandboxSpec, StopCause
from rayapp.extras.service.calls import CALL_HEADER, Calls
from rayapp.extras.service.sessions import Sessions

_TRACEBACK = "Traceback (most recent call last):"
_MAX_SHOWN_CODE_CHARS = 64_000


def with_last_value(code: str) -> tuple[str, str]:
    """Make code print its last expression, as a notebook does; return the new code, and the mark before the value.
    Other code stays, with an empty mark."""
    if len(code) > _MAX_SHOWN_CODE_CHARS:
        return code, ""
    tree = parse(code)
    if tree is None or not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        return code, ""
    mark = f"value-{uuid.uuid4().hex}:"
    source = code.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begin = starts[last.lineno - 1] + last.col_offset
    end = starts[(last.end_lineno or last.lineno) - 1] + (last.end_col_offset or 0)
    show = f"(lambda value: None if value is None else print({mark!r} + repr(value), end=''))".encode()
    # The expression stays on its lines, so that tracebacks have the right line numbers.
    shown = source[:begin] + show + b"(" + source[begin:end] + b")" + source[end:]
    return shown.decode(), mark


def code_answer(result: ExecResult, sandbox_id: str, mark: str = "") -> dict[str, Any]:
    stdout, value = _split_value(result.stdout, mark)
    stderr, traceback = result.stderr, ""
    if result.error and (at := stderr.rfind(_TRACEBACK)) >= 0:
        stderr, traceback = stderr[:at], stderr[at:]
    answer: dict[str, Any] = {
        "logs": {"stdout": [stdout] if stdout else [], "stderr": [stderr] if stderr else []},
        "results": [] if value is None else [{"text": value, "is_main_result": True}],
        "sandbox_id": sandbox_id,
    }
    if result.outcome is not ExecOutcome.OK:
        name, _, text = _error(result).partition(": ")
        answer["error"] = {"name": name, "value": text, "traceback": traceback.rstrip("\n")}
    return answer


def command_answer(result: ExecResult, sandbox_id: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "stdout": result.stdout,
        "stderr": result.stderr,
        "exit_code": result.exit_code,
        "sandbox_id": sandbox_id,
    }
    if result.stopped_for is not None:
        answer["error"] = _error(result)
    return answer


def _error(result: ExecResult) -> str:
    if result.stopped_for is not None:
        return f"ExecutionStopped: {result.stopped_for.value} limit, after {result.duration_s:.2f} s"
    return result.error or f"ExitError: exit code {result.exit_code}"


def _split_value(stdout: str, mark: str) -> tuple[str, str | None]:
    if not mark or mark not in stdout:
        return stdout, None
    text, _, value = stdout.rpartition(mark)
    return text, value


CREATE_FAILED, EXECUTION_FAILED, TIMED_OUT = -32002, -32003, -32005
_MARGIN_CHARS = 2000
_NAME = re.compile(r"[A-Za-z_]\w*")
_Context = Context[Any, Any]
Code = Annotated[str, Field(description="Source code; print what you want to see")]
Language = Annotated[str, Field(description="python")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Defaults and limits of a client's requests."""

    execution_timeout_s: float = 60.0
    max_execution_timeout_s: float = 600.0
    sandbox_ttl_s: float = 300.0
    max_sandbox_ttl_s: float = 3600.0
    max_output_bytes: int = 65536  # Largest stdout, and stderr. Code that writes more is stopped.
    # True if the header X-Template is passed to the provider; the local one has no templates.
    passes_templates: bool = False


class SandboxTools:
    """The MCP tools run_code, run_code_once and run_command. Clients and policies see the methods' signatures and
    docstrings.
    """

    def __init__(self, sessions: Sessions, calls: Calls, limits: ServerLimits) -> None:
        self._sessions = sessions
        self._calls = calls
        self._limits = limits

    async def run_code(self, code: Code, ctx: _Context, language: Language = "python") -> dict[str, Any]:
        """Run code in this session's interpreter. Names and files stay from one call to the next."""
        _check_language(language)
        asked = self._asked(ctx)
        shown, mark = with_last_value(code)
        async with self._failures(session := _session(ctx)):
            sandbox = await self._sessions.sandbox(session, asked.spec, ttl_s=asked.ttl_s)
            run = sandbox.run_code(
                shown, timeout_s=asked.timeout_s, stateful=True, max_output_bytes=self._limits.max_output_bytes
            )
            result = await self._calls.unless_hung_up(asked.call_id, run)
        _check_time(result, asked.timeout_s)
        return {**code_answer(result, sandbox.id, mark), "execution_count": self._sessions.count(session)}

    async def run_code_once(self, code: Code, ctx: _Context, language: Language = "python") -> dict[str, Any]:
        """Run code in a new sandbox that ends with it, and return what it printed."""
        _check_language(language)
        asked = self._asked(ctx)
        shown, mark = with_last_value(code)

        async def run() -> tuple[str, ExecResult]:
            async with self._sessions.once(asked.spec) as sandbox:
                most = self._limits.max_output_bytes
                return sandbox.id, await sandbox.run_code(shown, timeout_s=asked.timeout_s, max_output_bytes=most)

        async with self._failures(None):
            sandbox_id, result = await self._calls.unless_hung_up(asked.call_id, run())
        _check_time(result, asked.timeout_s)
        return code_answer(result, sandbox_id, mark)

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
        async with self._failures(session := _session(ctx)):
            sandbox = await self._sessions.sandbox(session, asked.spec, ttl_s=asked.ttl_s)
            run = sandbox.run_command(argv, timeout_s=asked.timeout_s, max_output_bytes=self._limits.max_output_bytes)
            result = await self._calls.unless_hung_up(asked.call_id, run)
        _check_time(result, asked.timeout_s)
        return command_answer(result, sandbox.id)

    def _asked(self, ctx: _Context) -> _CallHeaders:
        headers = {key.lower(): value for key, value in (ctx.headers or {}).items()}
        limits = self._limits
        timeout_s = _seconds(headers, "x-execution-timeout", limits.execution_timeout_s, limits.max_execution_timeout_s)
        ttl_s = _seconds(headers, "x-sandbox-ttl", limits.sandbox_ttl_s, limits.max_sandbox_ttl_s)
        template = headers.get("x-template", "") if limits.passes_templates else ""
        return _CallHeaders(
            call_id=headers.get(CALL_HEADER, ""),
            timeout_s=timeout_s,
            ttl_s=ttl_s,
            spec=SandboxSpec(template=template),
        )

    @asynccontextmanager
    async def _failures(self, session: str | None) -> AsyncIterator[None]:
        try:
            yield
        except SandboxGoneError as error:
            if session is None:
                raise MCPError(EXECUTION_FAILED, f"the sandbox died: {error}") from error
            await self._sessions.lose(session)
            raise ToolError(f"sandbox not found: {error}") from error
        except SandboxDeadlineError as error:
            if session is not None:
                await self._sessions.lose(session)
            raise MCPError(TIMED_OUT, f"no answer from the sandbox: {error}") from error
        except SandboxUnavailableError as error:
            raise MCPError(CREATE_FAILED, f"no sandbox is available: {error}") from error
        except SandboxError as error:
            raise MCPError(EXECUTION_FAILED, f"the sandbox failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallHeaders:
    call_id: str
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


def _session(ctx: _Context) -> str:
    mcp_id = next((v for k, v in (ctx.headers or {}).items() if k.lower() == "mcp-session-id"), "")
    if not mcp_id:
        raise ToolError("this tool needs an MCP session, but the client has none; use run_code_once")
    return mcp_id


def _check_language(language: str) -> None:
    if language.lower() not in ("python", "python3", "py"):
        raise ToolError(f"language {language!r} is not supported; use python")


def _check_time(result: ExecResult, timeout_s: float) -> None:
    if result.stopped_for is StopCause.TIMEOUT:
        said = (result.stdout + result.stderr)[-_MARGIN_CHARS:]
        raise MCPError(
            TIMED_OUT,
            f"execution timed out after {timeout_s:g} s" + (f"; the end of its output: {said}" if said else ""),
        )


def _shell_text(cmd: str, envs: Mapping[str, str], cwd: str | None) -> str:
    if wrong := [name for name in envs if not _NAME.fullmatch(name)]:
        raise ToolError(f"envs: {wrong[0]!r} is not a valid name of an environment variable")
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in envs.items())
    return exports + (f"cd {shlex.quote(cwd)} && " if cwd else "") + cmd
