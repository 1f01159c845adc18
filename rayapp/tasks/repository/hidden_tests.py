"""Hidden tests of a repository, written as pytest would read them, taken apart: what runs, and what it must give.

    assert total(cart) == 12   ->   inside: probe(total(cart))        outside: value == 12
    with pytest.raises(X): …   ->   inside: probe(what was raised)    outside: X is among its classes

Only the left column enters a sandbox: the code under test meets no expected value, so there is none to read and no
verdict to forge. A file that can't be taken apart so is refused when its task is loaded. Pure.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rayapp.core.errors import InputError
from rayapp.tasks.code.conditions import COMPARE
from rayapp.tasks.extraction import parse

Condition = Callable[[Any], object]
"""From what a probe gave, plain data, to a value that is true where the assertion holds. It may raise: then not."""
PROBE = "_rayapp_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTest:
    """One test function."""

    name: str
    """`test_cart.py::test_total`."""
    original: str
    """As it is written: part of the oracle."""
    source: str
    """Python that calls PROBE with a value for each condition, in order."""
    conditions: tuple[Condition, ...]

    def is_passed(self, values: object) -> bool:
        """Whether these are the values of a right answer: what came out of a sandbox, whatever it is."""
        if type(values) is not list or len(values) != len(self.conditions):
            return False
        try:
            return all(bool(holds(value)) for holds, value in zip(self.conditions, values, strict=True))
        except Exception:  # boundary: a comparison that these values don't support
            return False


def read_hidden_tests(file: str, source: str) -> tuple[HiddenTest, ...]:
    """The tests of one file.

    Raises:
        InputError: it is no Python, or a test can't be taken apart; with file and line.
    """
    tree = parse(source)
    if tree is None:
        raise InputError(f"{file} is no Python")
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    own = {node for node in tree.body if isinstance(node, ast.Import) and [a.name for a in node.names] == ["pytest"]}
    above = [node for node in tree.body if node not in tests and node not in own]
    for node in above:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            raise _refused(file, node, "tests are functions here, not methods of a class")
    lines = source.splitlines()
    return tuple(_hidden_test(file, above, test, lines) for test in tests)


def _hidden_test(file: str, above: Sequence[ast.stmt], test: ast.FunctionDef, lines: Sequence[str]) -> HiddenTest:
    if test.decorator_list or test.args.args:
        raise _refused(file, test, "marks, fixtures and parameters are not known here: write a test without them")
    reader = _Reader(file)
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


class _Reader:
    """Reads the statements of one test; `conditions` are those met so far."""

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
                    self._file, inside, "its expected value would enter the sandbox: write asserts one below the other"
                )
        return node

    def _probe(self, value: ast.expr) -> ast.expr:
        return ast.Call(ast.Name(PROBE, ast.Load()), [value], [])

    def _separated(self, test: ast.expr) -> ast.expr:
        """The part that runs inside; its condition is noted."""
        match test:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARE:
                return self._comparison(test, left, op, right)
        raise _refused(self._file, test, "an assert compares with a literal: `assert f(x) == 3`, `assert f(x) is True`")

    def _comparison(self, test: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.expr:
        compare = COMPARE[type(op)]
        if (found := _approximate(right)) is not None and isinstance(op, ast.Eq):
            self.conditions.append(lambda value: math.isclose(value, found, rel_tol=1e-6, abs_tol=1e-12))
            return left
        if _is_literal(right):
            wanted = ast.literal_eval(right)
            self.conditions.append(lambda value: compare(value, wanted))
            return left
        if _is_literal(left):
            wanted = ast.literal_eval(left)
            self.conditions.append(lambda value: compare(wanted, value))
            return right
        raise _refused(self._file, test, "one side of an assert has to be a literal")

    def _raises(self, node: ast.With, call: ast.Call) -> ast.stmt:
        match call:
            case ast.Call(args=[kind], keywords=[] | [ast.keyword(arg="match", value=ast.Constant(value=str()))]):
                name = ast.unparse(kind).rpartition(".")[2]
            case _:
                raise _refused(self._file, call, "write pytest.raises(Error) or pytest.raises(Error, match='text')")
        pattern = ast.literal_eval(call.keywords[0].value) if call.keywords else ""
        self.conditions.append(lambda value: name in value[0] and re.search(pattern, value[1]) is not None)
        # Everything in the block may raise: asserts in it would never be reached.
        body = [self.statement(inside) for inside in node.body]
        caught = ast.parse(f"{PROBE}([[kind.__name__ for kind in type(_error).__mro__], str(_error)[:2000]])").body
        missed = ast.parse(f"{PROBE}([[], ''])").body
        handler = ast.ExceptHandler(type=ast.Name("Exception", ast.Load()), name="_error", body=caught)
        return ast.Try(body=body, handlers=[handler], orelse=missed, finalbody=[])


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _approximate(node: ast.expr) -> float | None:
    """The number in `pytest.approx(number)`."""
    match node:
        case ast.Call(func=func, args=[number], keywords=[]) if ast.unparse(func) == "pytest.approx":
            return float(ast.literal_eval(number)) if _is_literal(number) else None
    return None


def _refused(file: str, node: ast.stmt | ast.expr, why: str) -> InputError:
    return InputError(f"{file}, line {node.lineno}: {why} (docs/environments.md)")
