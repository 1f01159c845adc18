"""The tools run_code, run_code_once and run_command, with the interface of OpenKruise's MCP server.

Headers choose the sandbox: X-Template, X-Sandbox-TTL (seconds), X-Execution-Timeout (seconds). Output and errors of
the code are data in the answer; a failed sandbox is an error of the protocol, with that server's codes. Answers:

run_code, run_code_once: {logs: {stdout, stderr}, results: [{text, is_main_result}], error?, sandbox_id, …}
run_command:             {stdout, stderr, exit_code, sandbox_id, error?}

`Sessions` assigns a sandbox to each MCP session. It is leased at the session's first call and given back when the
client ends the session, when its time to live is over, or when the server stops.
"""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import shlex
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from mcp import MCPError
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from rayapp.core.errors import SandboxDeadlineError, SandboxError, SandboxGoneError, SandboxUnavailableError
from rayapp.core.protocols import Sandbox, SandboxLease, SandboxSource
from rayapp.core.types import ExecOutcome, ExecResult, SandboxSpec, StopCause

log = logging.getLogger(__name__)
_MAX_REMEMBERED = 10_000
"""Sessions known at once, including ended ones: clients that vanish never end their session."""


@dataclass(slots=True)
class _Bound:
    """A session's sandbox."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: SandboxLease | None = None
    sandbox: Sandbox | None = None
    is_over: bool = False
    expiry: asyncio.TimerHandle | None = None
    num_executions: int = 0


class Sessions:
    """The sessions of one server and their sandboxes.

    Args:
        sandboxes: source of the leases.
        lease_timeout_s: longest wait for a sandbox.
    """

    def __init__(self, sandboxes: SandboxSource, *, lease_timeout_s: float) -> None:
        self._sandboxes = sandboxes
        self._lease_timeout_s = lease_timeout_s
        self._bound: dict[str, _Bound] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def num_bound(self) -> int:
        return sum(bound.sandbox is not None for bound in self._bound.values())

    def once(self, spec: SandboxSpec) -> SandboxLease:
        """Lease a sandbox for one execution."""
        return self._sandboxes.lease(spec, timeout_s=self._lease_timeout_s)

    async def sandbox(self, session_id: str, spec: SandboxSpec, *, ttl_s: float) -> Sandbox:
        """Return the session's sandbox.

        Raises:
            SandboxGoneError: it has ended; the session gets no new one, which would lack the session's names.
            SandboxError: no sandbox is available.
        """
        if len(self._bound) > _MAX_REMEMBERED:
            self._bound = {key: bound for key, bound in self._bound.items() if not bound.is_over}
        bound = self._bound.setdefault(session_id, _Bound())
        async with bound.lock:
            if bound.is_over:
                raise SandboxGoneError(f"the sandbox of session {session_id[:8]} was not found: it has ended")
            if bound.sandbox is None:
                lease = self._sandboxes.lease(spec, timeout_s=self._lease_timeout_s)
                bound.sandbox = await lease.__aenter__()
                bound.lease = lease
                bound.expiry = asyncio.get_running_loop().call_later(ttl_s, self._expire, session_id)
            return bound.sandbox

    def count(self, session_id: str) -> int:
        """Number of this execution in its session, from 1."""
        bound = self._bound[session_id]
        bound.num_executions += 1
        return bound.num_executions

    async def end(self, session_id: str) -> None:
        """Give the session's sandbox back: the client has ended the session. Idempotent."""
        bound = self._bound.pop(session_id, None)
        if bound is not None:
            await self._give_back(bound)

    async def lose(self, session_id: str) -> None:
        """Give up the session's sandbox, which is dead or expired: later calls fail with SandboxGoneError."""
        bound = self._bound.get(session_id)
        if bound is not None:
            await self._give_back(bound)

    async def close(self) -> None:
        """Give every sandbox back."""
        await asyncio.gather(*(self.end(session_id) for session_id in tuple(self._bound)))
        if self._ending:
            await asyncio.wait(self._ending, timeout=10.0)

    def _expire(self, session_id: str) -> None:
        task = asyncio.create_task(self.lose(session_id), name=f"end of session {session_id}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _give_back(self, bound: _Bound) -> None:
        bound.is_over = True
        lease, bound.lease, bound.sandbox = bound.lease, None, None
        if bound.expiry is not None:
            bound.expiry.cancel()
        if lease is not None:
            try:
                await asyncio.shield(lease.__aexit__(None, None, None))
            except Exception as error:  # boundary: if giving it back fails, the pool ends the sandbox
                log.warning("a session's sandbox was not given back: %s", error)


_TRACEBACK = "Traceback (most recent call last):"
_MAX_SHOWN_CODE_CHARS = 64_000


def with_last_value(code: str) -> tuple[str, str]:
    """Make code print its last expression's value, as a notebook does. Returns the code, and the mark before the value.

    Code that can't be parsed, or that does not end in an expression, is returned unchanged with an empty mark.
    """
    if len(code) > _MAX_SHOWN_CODE_CHARS:
        return code, ""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code, ""
    if not body or not isinstance(last := body[-1], ast.Expr):
        return code, ""
    mark = f"value-{uuid.uuid4().hex}:"
    source = code.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    begin = starts[last.lineno - 1] + last.col_offset
    end = starts[(last.end_lineno or last.lineno) - 1] + (last.end_col_offset or 0)
    show = f"(lambda value: None if value is None else print({mark!r} + repr(value), end=''))".encode()
    # Keep the expression on its lines, so that tracebacks name the right ones.
    shown = source[:begin] + show + b"(" + source[begin:end] + b")" + source[end:]
    return shown.decode(), mark


def code_answer(result: ExecResult, sandbox_id: str, mark: str = "") -> dict[str, Any]:
    """Build the structured answer of run_code and run_code_once."""
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
    """Build the structured answer of run_command."""
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
    """Time limit of an execution whose client gives none."""
    max_execution_timeout_s: float = 600.0
    sandbox_ttl_s: float = 300.0
    """Time to live of a session's sandbox whose client gives none."""
    max_sandbox_ttl_s: float = 3600.0
    max_output_bytes: int = 65536
    """Limit of stdout, and of stderr; code that writes more is stopped."""
    passes_templates: bool = False
    """True if X-Template is passed to the provider; the local provider has no templates and ignores it."""


class SandboxTools:
    """The three tools. Clients and policies see the methods' signatures and docstrings."""

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

    def _asked(self, ctx: _Context) -> _CallHeaders:
        headers = {key.lower(): value for key, value in (ctx.headers or {}).items()}
        limits = self._limits
        timeout_s = _seconds(headers, "x-execution-timeout", limits.execution_timeout_s, limits.max_execution_timeout_s)
        ttl_s = _seconds(headers, "x-sandbox-ttl", limits.sandbox_ttl_s, limits.max_sandbox_ttl_s)
        template = headers.get("x-template", "") if limits.passes_templates else ""
        return _CallHeaders(timeout_s=timeout_s, ttl_s=ttl_s, spec=SandboxSpec(template=template))

    @asynccontextmanager
    async def _failures(self, asked: _CallHeaders, session_id: str) -> AsyncIterator[None]:
        """Raise sandbox failures as errors of the protocol."""
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
            raise MCPError(CREATE_FAILED, f"no sandbox is available: {error}") from error
        except SandboxError as error:
            raise MCPError(EXECUTION_FAILED, f"the sandbox failed: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallHeaders:
    """Sandbox and limits that a call's headers ask for."""

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
        raise ToolError(f"envs: {wrong[0]!r} is not a valid name of an environment variable")
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in envs.items())
    return exports + (f"cd {shlex.quote(cwd)} && " if cwd else "") + cmd
