"""Tests that a data set writes as Python: MBPP's list of asserts, HumanEval's `check` function. Read, never run here.

Each assert becomes a `CallTest` (`conditions.py`), whose expected value stays outside. What can't be taken apart, such
as a loop over random inputs, becomes an `InsideTest`.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence

from rayapp.core.errors import InputError
from rayapp.tasks.code.conditions import InseparableError, separate
from rayapp.tasks.code.problem import CallTest, CodeTests, InsideTest, Test
from rayapp.tasks.extraction import parse

_CANDIDATE = "candidate"


def humaneval_tests(prompt: str, entry_point: str, test: str) -> CodeTests:
    """The tests of a HumanEval problem.

    Args:
        prompt: the beginning of a Python file that ends in the function's `def` line and docstring.
        test: source of `def check(candidate)`.
    Raises:
        InputError: prompt or test is no Python, or there is no check.
    """
    above = preamble_of(prompt, entry_point)
    check = next((n for n in _parse(test, "test").body if isinstance(n, ast.FunctionDef) and n.name == "check"), None)
    if check is None:
        raise InputError("its test defines no function check(candidate)")
    names = frozenset({_CANDIDATE, entry_point})
    try:
        tests: list[Test] = _separated(check.body, names)
    except InseparableError:
        # With the prompt's own helpers inside it, so that the candidate's of the same name don't count.
        tests = [_inside([*_parse(above, "prompt").body, *check.body], _CANDIDATE)]
    return _some(CodeTests(tests=tuple(tests), function=entry_point, preamble=above))


def mbpp_tests(test_list: Sequence[str], setup: str) -> CodeTests:
    """The tests of an MBPP problem; the function's name is read from the first.

    Args:
        setup: Python that stands between the solution and the asserts.
    Raises:
        InputError: a test is no assert of Python, or calls no function.
    """
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
    """What stands above the function in a HumanEval prompt: imports and helpers.

    Raises:
        InputError: the prompt is no Python, or does not end in this function.
    """
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
    """The function that an assert is about: the first one called that is none of Python's own."""
    asserted = [node.test for tree in tests for node in tree.body if isinstance(node, ast.Assert)]
    for node in (inside for test in asserted for inside in ast.walk(test)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in _OF_PYTHON:
            return node.func.id
    raise InputError("its tests assert nothing of a function")


def _some(tests: CodeTests) -> CodeTests:
    if not tests.tests:
        raise InputError("it has no tests")
    return tests


def _parse(source: str, name: str) -> ast.Module:
    tree = parse(source)
    if tree is None:
        raise InputError(f"its {name} is no Python: {source!r:.80}")
    return tree


_OF_PYTHON = frozenset(vars(builtins))
