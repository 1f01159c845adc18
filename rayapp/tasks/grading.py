"""Turns what code did in a sandbox into a verdict. Pure; called by coding tasks.

| what happened | reward | status |
|---|---|---|
| no function in the completion, or it does not parse | -1 | no_code, syntax_error |
| a banned name | -1 | banned |
| it is over a million characters, or takes over 2 s of CPU time to read | -1 | too_long, unreadable |
| defining it raised, or the process ended by itself | -1 | error |
| the whole run was stopped | -1 | timeout, memory, output, … (the cause) |
| every call raised, or returned what is no plain data | -1 | error |
| otherwise | passed / number of tests | scored |

A call that raises is one failed test, as long as some other call returns: a function that fails on the empty list is
still better than one that fails always. One that fails always has shown nothing, so it is an error, as in a script that
stops at its first exception. The number of tests is ours, never taken from the sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayapp.core.errors import SandboxProtocolError
from rayapp.core.types import CallReport, CallResult, Reward
from rayapp.sandbox.verdict.compare import same_value, shown
from rayapp.tasks.cases import Case

ERROR_REWARD = -1.0


def failure(status: str, detail: str, *, all_raised: bool = False) -> Reward:
    """A verdict of -1."""
    terms = _terms(passed=0, raised=int(all_raised), tests=1)
    return Reward(value=ERROR_REWARD, terms=terms, status=status, detail=detail)


def grade(report: CallReport, cases: Sequence[Case]) -> Reward:
    """Compare what came back with what was expected.

    Raises:
        SandboxProtocolError: not one result for each test, which is the sandbox's failure.
    """
    ran = report.exec
    if ran.stopped_for is not None:
        return failure(ran.stopped_for.value, f"stopped for {ran.stopped_for.value} after {ran.duration_s:.2f} s")
    if not ran.ok:
        return failure("error", ran.error or f"exit status {ran.exit_code}")
    if len(report.calls) != len(cases):
        raise SandboxProtocolError(f"{len(cases)} calls were asked for, {len(report.calls)} results came back")
    errors = [call.error for call in report.calls if not call.ok]
    if len(errors) == len(cases):
        return failure("error", f"every call failed: {_told(report.calls, cases, 0)}", all_raised=True)
    passes = [call.ok and same_value(call.value, case.expected) for call, case in zip(report.calls, cases, strict=True)]
    passed = sum(passes)
    return Reward(
        value=passed / len(cases),
        terms=_terms(passed=passed, raised=len(errors), tests=len(cases)),
        detail=_told(report.calls, cases, passes.index(False)) if False in passes else "",
    )


def _told(calls: Sequence[CallResult], cases: Sequence[Case], index: int) -> str:
    """One failed test, for a person."""
    call, case = calls[index], cases[index]
    given = ", ".join(map(shown, case.args))
    got = f"got {shown(call.value)}" if call.ok else f"raised {call.error}"
    return f"test {index + 1} of {len(cases)}: input {given}: {got}, expected {shown(case.expected)}"


def _terms(*, passed: int, raised: int, tests: int) -> dict[str, float]:
    return {
        "pass_rate": passed / tests,
        "solved": float(passed == tests),
        "raised_rate": raised / tests,
    }
