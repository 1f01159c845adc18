"""Turns a zygote's answer into the results that callers see. Pure; called by `sandbox.py`, outside the sandbox."""

from __future__ import annotations

import signal
from dataclasses import replace

from rayapp.core.errors import SandboxDeadlineError, SandboxGoneError
from rayapp.core.types import CallReport, CallResult, ExecOutcome, ExecResult, StopCause
from rayapp.sandbox.local.slot import Answer
from rayapp.sandbox.local.wire import split_frames
from rayapp.sandbox.verdict.codec import Frames, call_results, decode_frames


def script_result(answer: Answer, level: str) -> ExecResult:
    """The result of code run as a script.

    Raises:
        SandboxGoneError: the child never got as far as candidate code.
    """
    _check_started(answer)
    seen = decode_frames(split_frames(answer.results), 0)
    return _result(answer, level, error=seen.script_error, is_complete=True)


def session_result(answer: Answer, level: str) -> ExecResult:
    """The result of code run in a session. Its process goes on, so how it ended is what its own frames claim.

    Raises:
        SandboxGoneError: the session never got as far as candidate code.
    """
    _check_started(answer)
    seen = decode_frames(split_frames(answer.results), 0)
    result = _result(answer, level, error=seen.script_error, is_complete=seen.exit_status is not None)
    if result.exit_code != 0 or not seen.exit_status:
        return result
    return replace(result, outcome=ExecOutcome.CODE_FAILED, exit_code=seen.exit_status, error=seen.script_error)


def call_report(answer: Answer, level: str, num_calls: int) -> CallReport:
    """The report of a function called on several inputs; always one result per input.

    Raises:
        SandboxGoneError: the child never got as far as candidate code.
    """
    _check_started(answer)
    seen = decode_frames(split_frames(answer.results), num_calls)
    result = _result(answer, level, error=_call_error(seen), is_complete=seen.is_defined and seen.is_done)
    return CallReport(exec=result, calls=call_results(seen, num_calls, _why_missing(result)))


def refusal(error: str, level: str, num_calls: int = 0) -> CallReport:
    """The report of code that was refused without running it."""
    result = ExecResult(
        outcome=ExecOutcome.CODE_FAILED, exit_code=1, stdout="", stderr="", duration_s=0.0, error=error, isolation=level
    )
    return CallReport(exec=result, calls=(CallResult(ok=False, error=error),) * num_calls)


def _check_started(answer: Answer) -> None:
    if not answer.problem or answer.stopped == "killed":
        return
    if answer.stopped == "timeout":
        raise SandboxDeadlineError(
            f"the sandbox was not ready {answer.duration_s:.2f} s after the start: the node is overloaded, or "
            "timeout_s is too small"
        )
    raise SandboxGoneError(f"the sandbox could not be set up for this execution: {answer.problem}")


def _result(answer: Answer, level: str, *, error: str, is_complete: bool) -> ExecResult:
    exit_code = answer.exit_code
    stopped = _stop_cause(answer, exit_code)
    ended = ExecOutcome.OK if exit_code == 0 and is_complete else ExecOutcome.CODE_FAILED
    outcome = ended if stopped is None else ExecOutcome.CODE_STOPPED
    return ExecResult(
        outcome=outcome,
        exit_code=exit_code,
        stdout=answer.stdout.decode(errors="replace"),
        stderr=answer.stderr.decode(errors="replace"),
        duration_s=answer.duration_s,
        truncated=answer.stopped == "output",
        stopped_for=stopped,
        error=error or (_ending(exit_code) if outcome is ExecOutcome.CODE_FAILED else ""),
        isolation=level,
    )


def _stop_cause(answer: Answer, exit_code: int) -> StopCause | None:
    if answer.stopped is not None:
        return StopCause(answer.stopped)
    return StopCause.CPU if exit_code == -signal.SIGXCPU else None


def _call_error(seen: Frames) -> str:
    return seen.definition_error if not seen.is_defined else ""


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return (
            f"ended by {signal.Signals(-exit_code).name}" if -exit_code in set(signal.Signals) else "ended by a signal"
        )
    return f"ended with exit status {exit_code} before it was through"


def _why_missing(result: ExecResult) -> str:
    if result.stopped_for is not None:
        return f"no result: stopped for {result.stopped_for.value}"
    return f"no result: {result.error or 'the code ended first'}"
