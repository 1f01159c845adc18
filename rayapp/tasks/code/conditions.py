"""Takes an assertion apart: the calls of the function under test, and what must hold for their results.

    assert abs(f(1.5) - 0.5) < 1e-6   ->   calls ((1.5,),)   condition: abs(RESULT - 0.5) < 1e-6

Only the calls go to a sandbox; the condition is evaluated outside. It is never run as Python: each node of its syntax
tree becomes one of the operations below, and a node that is none of them makes the assertion inseparable. Rows of a
data set are so read without being trusted.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rayapp.sandbox.verdict.codec import check_hashes, encode_inputs
from rayapp.tasks.code.problem import CallTest

_Term = Callable[[Sequence[object]], Any]
_MOST_BITS = 1 << 20
_MOST_PARTS = 1 << 20


class InseparableError(Exception):
    """The assertion can't be taken apart."""


def separate(assertion: ast.expr, functions: frozenset[str]) -> CallTest | None:
    """The test of an assertion; None for one that calls nothing and holds anyway, such as `assert True`.

    Args:
        functions: names by which the assertion calls the function under test.
    Raises:
        InseparableError: it has to run as it is.
    """
    reader = _Reader(functions)
    condition = reader.term(assertion)
    if reader.calls:
        return CallTest(calls=tuple(reader.calls), condition=condition)
    if not _value(condition):
        raise InseparableError
    return None


class _Reader:
    """Reads one assertion; `calls` are those met so far, and a term takes the results of all of them."""

    def __init__(self, functions: frozenset[str]) -> None:
        self._functions = functions
        self.calls: list[tuple[object, ...]] = []

    def term(self, node: ast.expr) -> _Term:
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
        arguments = _value(_together(map(nested.term, node.args)))
        if nested.calls:
            raise InseparableError  # it is called with its own result
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
    """What a term without calls comes to."""
    try:
        return term(())
    except Exception as error:  # boundary: an expression of the data set
        raise InseparableError from error


def _check_plain(arguments: Sequence[object]) -> None:
    try:
        encode_inputs([arguments])
    except (TypeError, ValueError) as error:
        raise InseparableError from error


def _together(terms: Any) -> _Term:
    found = list(terms)
    return lambda results: [term(results) for term in found]


def _call(function: Callable[[Any], Any], argument: _Term) -> _Term:
    return lambda results: function(argument(results))


def _set(values: Any = ()) -> set[Any]:
    # One of the values may be a candidate's, made so that all of its parts have one hash.
    parts = list(values)
    check_hashes(parts)
    return set(parts)


def _power(base: Any, exponent: Any) -> Any:
    if type(base) is int and type(exponent) is int and base.bit_length() * abs(exponent) > _MOST_BITS:
        raise OverflowError
    return base**exponent


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str | bytes):
        raise TypeError("a text is no number")
    return left % right


def _product(left: Any, right: Any) -> Any:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | bytes | list | tuple) and type(times) is int and len(value) * times > _MOST_PARTS:
            raise OverflowError
    return left * right


_DISPLAYS: dict[type[ast.expr], Callable[[Any], Any]] = {ast.List: list, ast.Tuple: tuple, ast.Set: _set}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _product, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: _remainder, ast.Pow: _power,
}  # fmt: skip
COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda part, whole: part in whole, ast.NotIn: lambda part, whole: part not in whole,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "math.fabs": math.fabs, "math.isclose": math.isclose, "round": round, "len": len, "sorted": sorted,
    "set": _set, "frozenset": _set, "list": list, "tuple": tuple, "float": float, "int": int, "bool": bool,
    "sum": sum, "min": min, "max": max,
}  # fmt: skip
"""Functions of a condition, all without effects."""
_KEYWORDS = frozenset({"rel_tol", "abs_tol", "reverse"})
