"""Turns the results of a coding task's hidden tests into a verdict. Also parses, writes and reports a task's public
tests. No I/O.

| event | reward | status |
|---|---|---|
| the completion has no function, or the code does not parse | -1 | no_code, syntax_error |
| the code uses a banned name | -1 | banned |
| the code has over a million characters, or takes over 2 s of CPU time to read | -1 | too_long, unreadable |
| the definition raises, or the process exits | -1 | error |
| the whole run was stopped | -1 | timeout, memory, output, … (the cause) |
| every call raises, or returns a value that is not plain data | -1 | error |
| otherwise | passed / number of tests | scored |

If only some calls raise, each such call is a failed test: a function that fails only on the empty list is better than
one that always fails. A function that always raises has the status error, like a script that stops at its first
exception. The number of tests comes from the task, never from the sandbox.

An agent may read and run the public tests. They reveal nothing about the hidden tests, and don't affect the verdict.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from rayapp.core.errors import SandboxProtocolError
from rayapp.core.syntax import parse
from rayapp.core.types import CallReport, CallResult, PublicVerdict, Reward
from rayapp.sandbox.verdict.compare import same_value, shown
from rayapp.tasks.cases import Case

ERROR_REWARD = -1.0


def failure(status: str, detail: str, *, all_raised: bool = False) -> Reward:
    terms = _terms(passed=0, raised=int(all_raised), tests=1)
    return Reward(value=ERROR_REWARD, terms=terms, status=status, detail=detail)


def grade(report: CallReport, cases: Sequence[Case]) -> Reward:
    """Compare the calls' results with the expected values. SandboxProtocolError: their number differs."""
    ran = report.exec
    if ran.stopped_for is not None:
        return failure(ran.stopped_for.value, f"stopped for {ran.stopped_for.value} after {ran.duration_s:.2f} s")
    if not ran.ok:
        return failure("error", ran.error or f"exit status {ran.exit_code}")
    if len(report.calls) != len(cases):
        raise SandboxProtocolError(f"the sandbox returned {len(report.calls)} results for {len(cases)} calls")
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


_MAX_ERROR_CHARS = 200


def read_public_test(test: str, func_name: str, num_parameters: int) -> Case:
    """Parse a public test, `name(input, …) == output` with literals."""
    tree = parse(test.strip())
    match tree.body if tree is not None else []:
        case [ast.Expr(ast.Compare(ast.Call(ast.Name(name), inputs, []), [ast.Eq()], [output]))] if name == func_name:
            pass
        case _:
            raise ValueError(f"public test {test!r} must have the form {func_name}(…) == …")
    if len(inputs) != num_parameters:
        raise ValueError(f"public test {test!r} gives {len(inputs)} inputs, but the function takes {num_parameters}")
    try:
        return Case(args=tuple(map(ast.literal_eval, inputs)), expected=ast.literal_eval(output))
    except (ValueError, TypeError) as error:
        raise ValueError(f"public test {test!r}: its values must be literals: {error}") from None


def public_tests_file(func_name: str, tests: Sequence[str]) -> str:
    """Return the source of a script that exits with status 0 if `solution.py` passes all tests."""
    lines = [f"from solution import {func_name}", "", *(f"assert {test.strip()}" for test in tests)]
    return "\n".join([*lines, "", f'print("{len(tests)} tests passed")', ""])


def public_verdict(report: CallReport, cases: Sequence[Case], tests: Sequence[str]) -> PublicVerdict:
    """Return the pass rate of the public tests, and a report with one line for each test."""
    if not report.exec.ok:
        cause = report.exec.stopped_for
        text = f"stopped for {cause.value}" if cause is not None else report.exec.error
        return PublicVerdict(pass_rate=0.0, text=f"no test has run: {text}")
    results = list(zip(report.calls, cases, tests, strict=True))
    passed = [call.ok and same_value(call.value, case.expected) for call, case, _ in results]
    lines = [_line(call, test, is_passed) for (call, _, test), is_passed in zip(results, passed, strict=True)]
    told = "\n".join([f"{sum(passed)} of {len(passed)} tests passed", *lines])
    return PublicVerdict(pass_rate=sum(passed) / len(passed), text=told)


def _line(call: CallResult, test: str, is_passed: bool) -> str:
    if is_passed:
        return f"passed: {test.strip()}"
    return f"FAILED: {test.strip()}, got {shown(call.value) if call.ok else call.error[:_MAX_ERROR_CHARS]}"
