"""Executions in the form that OpenKruise's MCP server answers with. Pure; called by `tools.py`.

run_code, run_code_once: {logs: {stdout, stderr}, results: [{text, is_main_result}], error?, sandbox_id, …}
run_command:             {stdout, stderr, exit_code, sandbox_id, error?}
"""

from __future__ import annotations

import ast
import uuid
from typing import Any

from rayapp.core.types import ExecOutcome, ExecResult

_TRACEBACK = "Traceback (most recent call last):"
_MAX_SHOWN_CODE_CHARS = 64_000


def with_last_value(code: str) -> tuple[str, str]:
    """Code that also tells its last expression's value, as a notebook does, and the mark that stands before it.

    Code that can't be parsed, or that ends in something else, comes back as it is, with an empty mark.
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
    # On the lines where it stood, so that tracebacks name the right ones.
    shown = source[:begin] + show + b"(" + source[begin:end] + b")" + source[end:]
    return shown.decode(), mark


def code_answer(result: ExecResult, sandbox_id: str, mark: str = "") -> dict[str, Any]:
    """The structured answer of run_code and run_code_once."""
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
    """The structured answer of run_command."""
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
