"""Reads a repository's hidden tests, which are written for pytest; `grading.py` runs them. Pure functions.

Each test is separated into code that runs in the sandbox, and conditions that are checked outside:

    assert total(cart) == 12   ->   inside: probe(total(cart))        outside: value == 12
    with pytest.raises(X): …   ->   inside: probe(the exception)      outside: X is among its classes

The code under test runs without the expected values, so it can neither read them nor forge a verdict. A file with a
test that can't be separated is refused when its task is loaded.

The text process imports this module, so it may import only the standard library and modules that do the same.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayapp.core.errors import InputError
from rayapp.core.syntax import module, parse
from rayapp.tasks.code.conditions import COMPARE

# Function of a probe's value (plain data); if it raises, the assertion does not hold. It must be a `partial` of a
# function of this module, because it runs in the text process.
Condition = Callable[[Any], object]
PROBE = "_rayapp_probe"
_MOST_MESSAGE_CHARS = 2000  # Characters of an exception's message that are matched with a pattern.


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTest:
    name: str  # Name in pytest's form, such as `test_cart.py::test_total`.
    original: str  # Source of the test as written, which must not reach an agent.
    # Source that runs in the sandbox; it calls PROBE once for each condition, in order, with the value to check.
    source: str
    conditions: tuple[Condition, ...]


def all_hold(conditions: Sequence[Condition], values: object) -> bool:
    """Return whether a test's conditions hold for any data of a sandbox. If this raises, they don't."""
    if type(values) is not list or len(values) != len(conditions):
        return False
    return all(bool(holds(value)) for holds, value in zip(conditions, values, strict=True))


def read_hidden_tests(file: str, source: str) -> tuple[HiddenTest, ...]:
    """Return the tests of one file.

    Raises InputError: the file is not Python, or a test can't be separated; the message names file and line.
    """
    tree = parse(source)
    if tree is None:
        raise InputError(f"{file} is not Python")
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    own = {node for node in tree.body if isinstance(node, ast.Import) and [a.name for a in node.names] == ["pytest"]}
    above = [node for node in tree.body if node not in tests and node not in own]
    for node in above:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            raise _refused(file, node, "a test must be a function, not a method of a class")
    lines = source.splitlines()
    return tuple(_hidden_test(file, above, test, lines) for test in tests)


def _hidden_test(file: str, above: Sequence[ast.stmt], test: ast.FunctionDef, lines: Sequence[str]) -> HiddenTest:
    if test.decorator_list or test.args.args:
        raise _refused(file, test, "marks, fixtures and parameters are not supported: write a test without them")
    reader = _HiddenTestReader(file)
    body = [reader.statement(node) for node in test.body]
    if not reader.conditions:
        raise _refused(file, test, "the test asserts nothing")
    function = ast.FunctionDef(
        name=test.name, args=test.args, body=body, decorator_list=[], returns=None, type_comment=None
    )
    call = ast.Expr(ast.Call(ast.Name(test.name, ast.Load()), [], []))
    module = ast.fix_missing_locations(ast.Module(body=[*above, function, call], type_ignores=[]))
    return HiddenTest(
        name=f"{file}::{test.name}",
        original="\n".join(lines[test.lineno - 1 : test.end_lineno]),
        source=ast.unparse(module),
        conditions=tuple(reader.conditions),
    )


class _HiddenTestReader:
    """Reads the statements of one test into `conditions`."""

    def __init__(self, file: str) -> None:
        self._file = file
        self.conditions: list[Condition] = []

    def statement(self, node: ast.stmt) -> ast.stmt:
        match node:
            case ast.Assert(test=test):
                return ast.Expr(self._probe(self._separated(test)))
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=func) as call)]) if (
                ast.unparse(func) == "pytest.raises"
            ):
                return self._raises(node, call)
        for inside in ast.walk(node):
            if isinstance(inside, ast.Assert) or (
                isinstance(inside, ast.Call) and ast.unparse(inside.func).startswith("pytest.")
            ):
                raise _refused(
                    self._file,
                    inside,
                    "an assert or a pytest call inside another statement is refused: the expected value would be sent "
                    "into the sandbox. Write it at the top level of the test",
                )
        return node

    def _probe(self, value: ast.expr) -> ast.expr:
        return ast.Call(ast.Name(PROBE, ast.Load()), [value], [])

    def _separated(self, test: ast.expr) -> ast.expr:
        """Return the part of an assertion that runs in the sandbox, and append the condition to `conditions`."""
        match test:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARE:
                return self._comparison(test, left, op, right)
        raise _refused(
            self._file, test, "an assert must compare with a literal: `assert f(x) == 3`, `assert f(x) is True`"
        )

    def _comparison(self, test: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.expr:
        if (found := _approximate(right)) is not None and isinstance(op, ast.Eq):
            self.conditions.append(partial(_is_close, found))
            return left
        if _is_literal(right):
            self.conditions.append(partial(_compared, type(op), ast.literal_eval(right)))
            return left
        if _is_literal(left):
            self.conditions.append(partial(_compared_last, type(op), ast.literal_eval(left)))
            return right
        raise _refused(self._file, test, "one side of an assert's comparison must be a literal")

    def _raises(self, node: ast.With, call: ast.Call) -> ast.stmt:
        match call:
            case ast.Call(args=[kind], keywords=[] | [ast.keyword(arg="match", value=ast.Constant(value=str()))]):
                name = ast.unparse(kind).rpartition(".")[2]
            case _:
                raise _refused(self._file, call, "write pytest.raises(Error) or pytest.raises(Error, match='text')")
        pattern = ast.literal_eval(call.keywords[0].value) if call.keywords else ""
        # Asserts in the block become probes too, which come before the one of the exception.
        body = [self.statement(inside) for inside in node.body]
        self.conditions.append(partial(_was_raised, name, pattern))
        caught = module(
            f"{PROBE}([[kind.__name__ for kind in type(_error).__mro__], str(_error)[:{_MOST_MESSAGE_CHARS}]])"
        ).body
        missed = module(f"{PROBE}([[], ''])").body
        handler = ast.ExceptHandler(type=ast.Name("Exception", ast.Load()), name="_error", body=caught)
        return ast.Try(body=body, handlers=[handler], orelse=missed, finalbody=[])


def _is_close(wanted: float, value: Any) -> bool:
    return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-12)


def _compared(operator: type[ast.cmpop], wanted: object, value: object) -> object:
    return COMPARE[operator](value, wanted)


def _compared_last(operator: type[ast.cmpop], wanted: object, value: object) -> object:
    return COMPARE[operator](wanted, value)


def _was_raised(name: str, pattern: str, value: Any) -> bool:
    names, message = value
    # Cut the message here too: the probe cuts it inside the sandbox, but the tested code may have replaced the probe.
    return name in names and re.search(pattern, message[:_MOST_MESSAGE_CHARS]) is not None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _approximate(node: ast.expr) -> float | None:
    """Return the number in `pytest.approx(number)`; None for any other expression."""
    match node:
        case ast.Call(func=func, args=[number], keywords=[]) if ast.unparse(func) == "pytest.approx":
            return float(ast.literal_eval(number)) if _is_literal(number) else None
    return None


def _refused(file: str, node: ast.stmt | ast.expr, why: str) -> InputError:
    return InputError(f"{file}, line {node.lineno}: {why} (docs/environments.md)")
