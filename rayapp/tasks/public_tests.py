"""Tests of a coding task that an agent may see: read from the task, written as a file, and told from what its code did.

Called by coding tasks. They teach nothing about the hidden tests, and no verdict rests on them.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from rayapp.core.types import CallReport, CallResult, PublicVerdict
from rayapp.sandbox.verdict.compare import same_value, shown
from rayapp.tasks.cases import Case
from rayapp.tasks.extraction import parse

_MAX_ERROR_CHARS = 200


def read_public_test(test: str, func_name: str, num_parameters: int) -> Case:
    """`name(input, …) == output` as inputs and output.

    Raises:
        ValueError: it has another form, or values that are no literals.
    """
    tree = parse(test.strip())
    match tree.body if tree is not None else []:
        case [ast.Expr(ast.Compare(ast.Call(ast.Name(name), inputs, []), [ast.Eq()], [output]))] if name == func_name:
            pass
        case _:
            raise ValueError(f"public test {test!r} is not of the form {func_name}(…) == …")
    if len(inputs) != num_parameters:
        raise ValueError(f"public test {test!r} gives {len(inputs)} inputs; the function takes {num_parameters}")
    try:
        return Case(args=tuple(map(ast.literal_eval, inputs)), expected=ast.literal_eval(output))
    except (ValueError, TypeError) as error:
        raise ValueError(f"public test {test!r}: its values must be literals: {error}") from None


def public_tests_file(func_name: str, tests: Sequence[str]) -> str:
    """A script that ends well where `solution.py` passes all of them."""
    lines = [f"from solution import {func_name}", "", *(f"assert {test.strip()}" for test in tests)]
    return "\n".join([*lines, "", f'print("{len(tests)} tests passed")', ""])


def public_verdict(report: CallReport, cases: Sequence[Case], tests: Sequence[str]) -> PublicVerdict:
    """Test by test, what the code gave."""
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
