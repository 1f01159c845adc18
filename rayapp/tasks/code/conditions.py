"""Reads tests that a data set writes as Python (MBPP's asserts, HumanEval's `check`): calls, and conditions on results.

    assert abs(f(1.5) - 0.5) < 1e-6   ->   CallTest: calls ((1.5,),)   condition: abs(RESULT - 0.5) < 1e-6

Only the calls go to a sandbox. The condition is evaluated in the text process, by operations of this module for each
node of its syntax tree, never as Python. A test that can't be separated becomes an `InsideTest`. Rows are not trusted:
constants are limited in size.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rayapp.core.errors import InputError
from rayapp.core.syntax import expression, parse
from rayapp.sandbox.verdict.compare import check_hashes
from rayapp.sandbox.verdict.harness import pack
from rayapp.tasks.code.hidden_cases import CallTest, CodeTests, InsideTest, Test

_Term = Callable[[Sequence[object]], Any]
_MOST_BITS = 1 << 20
_MOST_PARTS = 1 << 20
_MOST_CONSTANTS = 1 << 21  # parts (`_num_parts`) of all constants of an assertion, with intermediate results


class InseparableError(Exception):
    """The assertion can't be separated into calls and a condition."""


def separate(assertion: ast.expr, functions: frozenset[str]) -> CallTest | None:
    """Return the test of an assertion that calls one of `functions`; None for a true assertion without calls.
    InseparableError: it has to run unchanged inside the sandbox."""
    reader = _Reader(functions)
    condition = reader.term(assertion)
    if reader.calls:
        source = ast.unparse(assertion)
        return CallTest(calls=tuple(reader.calls), condition=functools.partial(holds, source, functions))
    if not _value(condition):
        raise InseparableError
    return None


def holds(assertion: str, functions: frozenset[str], results: Sequence[object]) -> bool:
    """True if an assertion that `separate` accepted holds for these results of its calls."""
    return bool(_condition(assertion, functions)(results))


@functools.lru_cache(maxsize=64)
def _condition(assertion: str, functions: frozenset[str]) -> _Term:
    return _Reader(functions).term(expression(assertion))


class _Reader:
    """Reads one assertion. A term is a function from the results of all calls (found so far: `calls`) to a value."""

    def __init__(self, functions: frozenset[str]) -> None:
        self._functions = functions
        self.calls: list[tuple[object, ...]] = []
        self._parts_left = _MOST_CONSTANTS

    def term(self, node: ast.expr) -> _Term:
        """Return the term of an expression. An expression without calls is evaluated here, once."""
        num_calls = len(self.calls)
        term = self._term(node)
        if len(self.calls) > num_calls:
            return term
        value = _value(term)
        self._parts_left -= _num_parts(value)
        if self._parts_left < 0:
            raise InseparableError
        return lambda _: value

    def _term(self, node: ast.expr) -> _Term:
        match node:
            case ast.Constant(value=value):
                return lambda _: value
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return _call(_DISPLAYS[type(node)], _together(map(self.term, parts)))
            case ast.Dict(keys=keys, values=values) if None not in keys:
                pairs = _together(map(self.term, [key for key in keys if key is not None]))
                items = _together(map(self.term, values))
                return lambda results: dict(zip(pairs(results), items(results), strict=True))
            case ast.UnaryOp(op=op, operand=operand):
                return _call(_UNARY[type(op)], self.term(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                combine, pair = _BINARY[type(op)], _together(map(self.term, (left, right)))
                return lambda results: combine(*pair(results))
            case ast.BoolOp(op=op, values=values):
                judge = all if isinstance(op, ast.And) else any
                return _call(judge, _together(map(self.term, values)))
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._comparison([left, *others], ops)
            case ast.Call():
                return self._call(node)
            case ast.Attribute(value=ast.Name(id="math"), attr="pi" | "e" | "inf" | "nan" as name):
                return lambda _: getattr(math, name)
        raise InseparableError

    def _comparison(self, nodes: Sequence[ast.expr], ops: Sequence[ast.cmpop]) -> _Term:
        terms = _together(map(self.term, nodes))
        operators = [COMPARE[type(op)] for op in ops]

        def compare(results: Sequence[object]) -> bool:
            values = terms(results)
            return all(op(*pair) for op, pair in zip(operators, itertools.pairwise(values), strict=True))

        return compare

    def _call(self, node: ast.Call) -> _Term:
        name = ast.unparse(node.func)
        if any(isinstance(argument, ast.Starred) for argument in node.args):
            raise InseparableError
        if name not in self._functions:
            return self._known_function(name, node)
        if node.keywords:
            raise InseparableError
        nested = _Reader(self._functions)
        nested._parts_left = self._parts_left
        arguments = _value(_together(map(nested.term, node.args)))
        self._parts_left = nested._parts_left
        if nested.calls:
            raise InseparableError  # the function is called with its own result
        _check_plain(arguments)
        self.calls.append(tuple(arguments))
        index = len(self.calls) - 1
        return lambda results: results[index]

    def _known_function(self, name: str, node: ast.Call) -> _Term:
        if name not in _FUNCTIONS or any(keyword.arg not in _KEYWORDS for keyword in node.keywords):
            raise InseparableError
        function = _FUNCTIONS[name]
        arguments = _together(map(self.term, node.args))
        options = {keyword.arg or "": self.term(keyword.value) for keyword in node.keywords}
        return lambda results: function(
            *arguments(results), **{option: term(results) for option, term in options.items()}
        )


def _value(term: _Term) -> Any:
    try:
        return term(())
    except Exception as error:  # boundary: the data set's expression may raise anything
        raise InseparableError from error


def _check_plain(arguments: Sequence[object]) -> None:
    try:
        pack(list(arguments))
    except (TypeError, ValueError) as error:
        raise InseparableError from error


def _together(terms: Any) -> _Term:
    found = list(terms)
    return lambda results: [term(results) for term in found]


def _call(function: Callable[[Any], Any], argument: _Term) -> _Term:
    return lambda results: function(argument(results))


def _set(values: Any = ()) -> set[Any]:
    # A candidate may return a value whose parts all have the same hash, which would make the set slow.
    parts = list(values)
    check_hashes(parts)
    return set(parts)


def _power(base: Any, exponent: Any) -> Any:
    if type(base) is int and type(exponent) is int and base.bit_length() * abs(exponent) > _MOST_BITS:
        raise OverflowError
    return base**exponent


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        raise TypeError("a string is not a number")
    return left % right


def _product(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MOST_BITS:
            raise OverflowError
    elif type(left) is int or type(right) is int:
        value, times = (right, left) if type(left) is int else (left, right)
        if isinstance(value, str | bytes | list | tuple) and _num_parts(value) * times > _MOST_PARTS:
            raise OverflowError
    return left * right


def _plus(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes | list | tuple) and _num_parts(left) + _num_parts(right) > _MOST_PARTS:
        raise OverflowError
    return left + right


def _sum(values: Any, start: Any = 0) -> Any:
    parts = [start, *values]
    if not all(isinstance(part, int | float) for part in parts):
        raise TypeError("only numbers can be summed: summing lists takes quadratic time")
    return sum(parts)


def _num_parts(value: Any) -> int:
    """Count leaves and containers in plain data; a string has one part for each character."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return 1 + sum(map(_num_parts, itertools.chain(value, value.values())))
    return 1 + sum(map(_num_parts, value)) if isinstance(value, list | tuple | set) else 1


_DISPLAYS: dict[type[ast.expr], Callable[[Any], Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: _set}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _plus, ast.Sub: operator.sub, ast.Mult: _product, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: _remainder, ast.Pow: _power,
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda part, whole: part in whole, ast.NotIn: lambda part, whole: part not in whole,
}  # fmt: skip
# Functions that a condition may call; none has side effects.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "math.fabs": math.fabs, "math.isclose": math.isclose, "round": round, "len": len, "sorted": sorted,
    "set": _set, "frozenset": _set, "list": list, "tuple": tuple, "float": float, "int": int, "bool": bool,
    "sum": _sum, "min": min, "max": max,
}  # fmt: skip
_KEYWORDS = frozenset({"rel_tol", "abs_tol", "reverse"})


_CANDIDATE = "candidate"


def humaneval_tests(prompt: str, entry_point: str, test: str) -> CodeTests:
    """Return the tests of a HumanEval problem; `test` is the source of `def check(candidate)`."""
    above = preamble_of(prompt, entry_point)
    check = next((n for n in _parse(test, "test").body if isinstance(n, ast.FunctionDef) and n.name == "check"), None)
    if check is None:
        raise InputError("its test defines no function check(candidate)")
    names = frozenset({_CANDIDATE, entry_point})
    try:
        tests: list[Test] = _separated(check.body, names)
    except InseparableError:
        # Put the prompt's helper functions into the check, so that it does not use the candidate's versions.
        tests = [_inside([*_parse(above, "prompt").body, *check.body], _CANDIDATE)]
    return _some(CodeTests(tests=tuple(tests), function=entry_point, preamble=above))


def mbpp_tests(test_list: Sequence[str], setup: str) -> CodeTests:
    """Return the tests of an MBPP problem; `setup` runs after the solution. The asserts name the function."""
    function = _function_of([_parse(test, "test") for test in test_list])
    above = _parse(setup, "test_setup_code").body
    only_imports = all(isinstance(node, ast.Import | ast.ImportFrom) for node in above)
    tests: list[Test] = []
    for test in test_list:
        body = _parse(test, "test").body
        try:
            if not only_imports:
                raise InseparableError
            tests += _separated(body, frozenset({function}))
        except InseparableError:
            tests.append(_inside([*above, *body], function))
    return _some(CodeTests(tests=tuple(tests), function=function, num_public=len(tests)))


def preamble_of(prompt: str, entry_point: str) -> str:
    """Return the code above the function in a HumanEval prompt: imports and helpers."""
    body = _parse(f"{prompt}\n    pass\n", "prompt").body
    last = body[-1] if body else None
    if not isinstance(last, ast.FunctionDef) or last.name != entry_point:
        raise InputError(f"its prompt does not end in the function {entry_point}")
    return ast.unparse(ast.Module(body=body[:-1], type_ignores=[]))


def _separated(body: Sequence[ast.stmt], names: frozenset[str]) -> list[Test]:
    found: list[CallTest] = []
    for node in body:
        match node:
            case ast.Assert(test=test):
                separated = separate(test, names)
                found += [separated] if separated is not None else []
            case ast.Import() | ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case _:
                raise InseparableError
    return list(found)


def _inside(body: Sequence[ast.stmt], name: str) -> InsideTest:
    arguments = ast.arguments(posonlyargs=[], args=[ast.arg(name)], kwonlyargs=[], kw_defaults=[], defaults=[])
    check = ast.FunctionDef(name="check", args=arguments, body=list(body), decorator_list=[])
    imports = [node for statement in body for node in ast.walk(statement)]
    modules = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and node.module}
    source = ast.unparse(ast.fix_missing_locations(ast.Module(body=[check], type_ignores=[])))
    return InsideTest(check=source, modules=tuple(sorted(modules)))


def _function_of(tests: Sequence[ast.Module]) -> str:
    # The first function called in an assert that is not a builtin; if all are, the outermost: one problem of MBPP asks
    # for `sum`.
    asserted = [node.test for tree in tests for node in tree.body if isinstance(node, ast.Assert)]
    inside = [node for test in asserted for node in ast.walk(test)]
    called = [node.func.id for node in inside if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    if not called:
        raise InputError("no assert in its tests calls a function")
    return next((name for name in called if name not in _OF_PYTHON), called[0])


def _some(tests: CodeTests) -> CodeTests:
    if not tests.tests:
        raise InputError("it has no tests")
    return tests


def _parse(source: str, name: str) -> ast.Module:
    tree = parse(source)
    if tree is None:
        raise InputError(f"its {name} is not Python: {source!r:.80}")
    return tree


_OF_PYTHON = frozenset(vars(builtins))
