"""Converts raw results of executions to the results that callers get. Pure functions; they run outside the sandbox."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rayapp.core.errors import SandboxDeadlineError, SandboxGoneError
from rayapp.core.types import CallReport, CallResult, ExecOutcome, ExecResult, StopCause
from rayapp.sandbox.verdict.codec import Frames, call_results, decode_frames

NO_REPORT = "the code ended the process that watched it"
MAX_CODE_CHARS = 1 << 20  # No honest answer is longer, and compiling it would take too much memory.


def split_lines(raw: bytes) -> Iterator[bytes]:
    """Yield frames that were written one per line, lazily: there may be millions of which only a few are read."""
    return (line.rstrip(b"\n") for line in io.BytesIO(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class RawResult:
    """Raw result of one execution, not trusted if hostile code could write it."""

    exit_code: int  # -N if signal N ended the process
    stopped: StopCause | None
    stdout: bytes
    stderr: bytes
    frames: bytes  # not yet decoded; a candidate may have forged them
    split: Callable[[bytes], Iterator[bytes]] = split_lines
    duration_s: float
    problem: str = ""  # why candidate code could not start


def code_problem(code: str) -> str | None:
    """Return the error message with which code is refused; None if it may run."""
    if type(code) is not str:
        raise TypeError(f"code must be a str, not {type(code).__name__}")
    if len(code) > MAX_CODE_CHARS:
        return f"ValueError: the code has {len(code)} characters; at most {MAX_CODE_CHARS} are run"
    return None


def script_result(answer: RawResult, isolation: str) -> ExecResult:
    """Return the result of a script or command; SandboxGoneError if it was never started."""
    seen = _frames(answer, 0)
    return _result(answer, isolation, error=seen.script_error, is_complete=True)


def session_result(answer: RawResult, isolation: str) -> ExecResult:
    """Return the result of a session's run: its process continues, so the exit status is in the frames. Code that
    forges them changes only its own result."""
    seen = _frames(answer, 0)
    result = _result(answer, isolation, error=seen.script_error, is_complete=seen.exit_status is not None)
    if result.exit_code != 0 or not seen.exit_status:
        return result
    return replace(result, outcome=ExecOutcome.CODE_FAILED, exit_code=seen.exit_status, error=seen.script_error)


def call_report(answer: RawResult, isolation: str, num_calls: int) -> CallReport:
    """Return exactly one result per input."""
    seen = _frames(answer, num_calls)
    error = seen.definition_error if not seen.is_defined else ""
    result = _result(answer, isolation, error=error, is_complete=seen.is_defined and seen.is_done)
    return CallReport(exec=result, calls=call_results(seen, num_calls, _why_missing(result)))


def failure(error: str, isolation: str, *, exit_code: int = 1, stopped_for: StopCause | None = None) -> ExecResult:
    return ExecResult(
        outcome=ExecOutcome.CODE_STOPPED if stopped_for is not None else ExecOutcome.CODE_FAILED,
        exit_code=exit_code,
        stdout="",
        stderr="",
        duration_s=0.0,
        stopped_for=stopped_for,
        error="" if stopped_for is not None else error,
        isolation=isolation,
    )


def failed_calls(result: ExecResult, num_calls: int) -> CallReport:
    """Return a report in which every call failed, for the reason why the execution ended."""
    return CallReport(exec=result, calls=(CallResult(ok=False, error=_why_missing(result)),) * num_calls)


def _frames(answer: RawResult, num_calls: int) -> Frames:
    if answer.problem and answer.stopped is StopCause.TIMEOUT:
        raise SandboxDeadlineError(
            f"the sandbox was not ready {answer.duration_s:.2f} s after the start: the node is overloaded, or "
            "timeout_s is too small"
        )
    if answer.problem and answer.stopped is not StopCause.KILLED:
        raise SandboxGoneError(f"the sandbox could not be set up for this execution: {answer.problem}")
    return decode_frames(answer.split(answer.frames), num_calls)


def _result(answer: RawResult, isolation: str, *, error: str, is_complete: bool) -> ExecResult:
    exit_code = answer.exit_code
    stopped = answer.stopped or (StopCause.CPU if exit_code == -signal.SIGXCPU else None)
    ended = ExecOutcome.OK if exit_code == 0 and is_complete else ExecOutcome.CODE_FAILED
    outcome = ended if stopped is None else ExecOutcome.CODE_STOPPED
    return ExecResult(
        outcome=outcome,
        exit_code=exit_code,
        stdout=answer.stdout.decode(errors="replace"),
        stderr=answer.stderr.decode(errors="replace"),
        duration_s=answer.duration_s,
        truncated=stopped is StopCause.OUTPUT,
        stopped_for=stopped,
        error=error or (_ending(exit_code) if outcome is ExecOutcome.CODE_FAILED else ""),
        isolation=isolation,
    )


def _ending(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit status {exit_code} before it had finished"
    names = {int(number): number.name for number in signal.Signals}
    return f"ended by {names.get(-exit_code, 'a signal')}"


def _why_missing(result: ExecResult) -> str:
    if result.stopped_for is not None:
        return f"no result: stopped for {result.stopped_for.value}"
    return f"no result: {result.error or 'the code ended first'}"
