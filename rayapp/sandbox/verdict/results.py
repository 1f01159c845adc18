"""From what a remote sandbox reports to the results that callers see. Pure; called by `remote.py`."""

from __future__ import annotations

import signal

from rayapp.core.types import CallReport, CallResult, ExecOutcome, ExecResult, StopCause
from rayapp.sandbox.verdict.codec import Frames, call_results, decode_frames, max_frames
from rayapp.sandbox.verdict.program import Report

NO_REPORT = "the code ended the process that watched it"


def script_result(report: Report, provider: str) -> ExecResult:
    """Of code run as a script, or of a command."""
    seen = _frames(report, 0)
    return _result(report, provider, error=seen.script_error, is_complete=True)


def call_report(report: Report, provider: str, num_calls: int) -> CallReport:
    """Of a function called on several inputs; always one result per input."""
    seen = _frames(report, num_calls)
    error = seen.definition_error if not seen.is_defined else ""
    result = _result(report, provider, error=error, is_complete=seen.is_defined and seen.is_done)
    return CallReport(exec=result, calls=call_results(seen, num_calls, _why_missing(result)))


def failure(error: str, provider: str, *, exit_code: int = 1, stopped_for: StopCause | None = None) -> ExecResult:
    """Of code that has no more to show than this."""
    return ExecResult(
        outcome=ExecOutcome.CODE_STOPPED if stopped_for is not None else ExecOutcome.CODE_FAILED,
        exit_code=exit_code,
        stdout="",
        stderr="",
        duration_s=0.0,
        stopped_for=stopped_for,
        error="" if stopped_for is not None else error,
        isolation=provider,
    )


def failed_calls(result: ExecResult, num_calls: int) -> CallReport:
    """No call has a result."""
    return CallReport(exec=result, calls=(CallResult(ok=False, error=_why_missing(result)),) * num_calls)


def _frames(report: Report, num_calls: int) -> Frames:
    # Not all lines there are: two million of them would take longer to split than the code took to write.
    return decode_frames(report.frames.split(b"\n", max_frames(num_calls)), num_calls)


def _result(report: Report, provider: str, *, error: str, is_complete: bool) -> ExecResult:
    stopped = StopCause(report.stopped) if report.stopped else None
    ended = ExecOutcome.OK if report.status == 0 and is_complete else ExecOutcome.CODE_FAILED
    outcome = ended if stopped is None else ExecOutcome.CODE_STOPPED
    return ExecResult(
        outcome=outcome,
        exit_code=report.status if stopped is None else -signal.SIGKILL,
        stdout=report.stdout.decode(errors="replace"),
        stderr=report.stderr.decode(errors="replace"),
        duration_s=report.duration_s,
        truncated=stopped is StopCause.OUTPUT,
        stopped_for=stopped,
        error=error or (_ending(report.status) if outcome is ExecOutcome.CODE_FAILED else ""),
        isolation=provider,
    )


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status} before it was through"
    names = {int(number): number.name for number in signal.Signals}
    return f"ended by {names.get(-status, 'a signal')}"


def _why_missing(result: ExecResult) -> str:
    if result.stopped_for is not None:
        return f"no result: stopped for {result.stopped_for.value}"
    return f"no result: {result.error or 'the code ended first'}"
