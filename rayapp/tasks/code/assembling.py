"""Puts together what runs: a candidate's code, what stands above it, and how it is called.

`screen_answer` parses what a policy wrote, so it is called through the text process; it and all it imports need the
standard library alone. The rest only joins texts. Names of ours in the candidate's module begin with `_rayapp`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rayapp.tasks.extraction import parse
from rayapp.tasks.screening import screen

RECURSION = "import sys; sys.setrecursionlimit(50000)"
"""Stands above every solution of these data sets."""
IMPORTS = (
    "from string import *; from re import *; from datetime import *; from collections import *; from heapq import *; "
    "from bisect import *; from copy import *; from math import *; from random import *; from statistics import *; "
    "from itertools import *; from functools import *; from operator import *; from io import *; from sys import *; "
    "from json import *; from builtins import *; from typing import *; import string, re, datetime, collections, "
    "heapq, bisect, copy, math, random, statistics, itertools, functools, operator, io, sys, json"
)
"""What the checkers of APPS, PRIME and LiveCodeBench put above every solution, besides RECURSION. It takes longer than
most programs, so it is there only for code that uses some of it."""
ENTRY = "_rayapp_entry"
"""The function that is called, in place of the candidate's own."""
_CALL = """

def _rayapp_entry(*args):
    import builtins as b
    def plain(value):
        for kind in (b.bool, b.int, b.float, b.str, b.bytes):
            if b.isinstance(value, kind):
                return kind(value)
        for kind in (b.list, b.tuple, b.set):
            if b.isinstance(value, kind):
                return kind([plain(part) for part in value])
        if b.isinstance(value, b.frozenset):
            return {plain(part) for part in value}
        if b.isinstance(value, b.dict):
            return {plain(key): plain(item) for key, item in value.items()}
        return value
    return plain(@TARGET(*args))
"""
# A Counter or a number of numpy's equals a plain value, and only plain values leave the sandbox.
_GUARD = """
def _rayapp_guard_@TOKEN():
    import importlib
    import builtins
    from builtins import TypeError, dict, isinstance, list, set, setattr, tuple, type, vars
    owners = [builtins, *[importlib.import_module(name) for name in @MODULES]]
    owners += [kind for owner in owners[1:] for kind in vars(owner).values()
               if isinstance(kind, type) and kind.__flags__ & 1 << 9]
    kept = [(owner, dict(vars(owner))) for owner in owners]
    leaves = (type(None), builtins.bool, builtins.int, builtins.float, builtins.str, builtins.bytes)
    def restore():
        for owner, names in kept:
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
    def check_plain(value):
        kind = type(value)
        if kind is dict:
            check_plain(list(value.values()))
        if kind in (list, tuple, set, dict):
            for part in value:
                check_plain(part)
        elif kind not in leaves:
            raise TypeError(kind.__name__ + " is not plain data")
    def guarded(function):
        def call(*args, **options):
            value = function(*args, **options)
            restore()
            check_plain(value)
            return value
        return call
    return restore, guarded
_rayapp_tools_@TOKEN = _rayapp_guard_@TOKEN()
"""
_CHECK = """

def _rayapp_entry(token, tools=_rayapp_tools_@TOKEN):
    restore, guarded = tools
    restore()
    import random
    random.seed(0)
@CHECK
    check(guarded(@TARGET))
    return token
"""


@dataclass(frozen=True, slots=True)
class Screened:
    """What there is of an answer."""

    code: str
    status: str
    """Empty where the code may run, else the verdict's."""
    detail: str
    line: int
    """Other code may be put in below this line."""
    target: str
    """How the function is named in a call; empty for a program."""
    needs_imports: bool
    """It uses a name that IMPORTS would give it."""


def screen_answer(completion: str, function: str, prefill: str) -> tuple[str, str, str, int, str, bool]:
    """The fields of `Screened`.

    Args:
        function: name of the function to write, or of a method of `class Solution`; empty for a program.
    """
    code, status, detail = screen(completion, function, prefill, ())
    tree = None if status else parse(code)
    if tree is None:
        return code, status, detail, 0, "", False
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    futures = [node.end_lineno or 0 for node in imports if node.module == "__future__"]
    is_function = any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)
    target = function if is_function or not function else f"Solution().{function}"
    return code, "", "", max(futures, default=0), target, _needs_imports(tree)


def _needs_imports(tree: ast.Module) -> bool:
    # A name that is only bound in some function counts as missing: then the imports are there in vain.
    bound = {name for statement in tree.body for name in _bound_by(statement)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return not _imported_names().isdisjoint(used - bound)


def _bound_by(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]):
            return [name]
    return []


@functools.cache
def _imported_names() -> frozenset[str]:
    names: dict[str, object] = {}
    exec(IMPORTS, names)
    return frozenset(names) - frozenset(vars(builtins))


def with_preamble(code: str, line: int, preamble: str) -> str:
    """The code with the preamble below this line of it."""
    lines = code.split("\n")
    return "\n".join([*lines[:line], preamble, *lines[line:]]) if preamble else code


def callable_code(code: str, target: str) -> str:
    """The code with an ENTRY that calls the candidate's function and gives its value as plain data."""
    return code + _CALL.replace("@TARGET", target)


def checked_code(code: str, line: int, target: str, check: str, modules: Sequence[str], token: str) -> str:
    """The code with an ENTRY that runs a check on the candidate's function, and gives its argument if that passes.

    What the check uses (builtins and these modules) is remembered above the candidate's code and put back below it and
    after each call, and only plain values reach the check: a candidate can't pass by replacing `abs`, or by returning
    an object that equals everything. One that searches the interpreter's frames for the argument can.

    Args:
        token: part of our names, which the candidate can't know.
    """
    guard = _GUARD.replace("@MODULES", repr(list(modules))).replace("@TOKEN", token)
    below = _CHECK.replace("@CHECK", textwrap.indent(check, "    ")).replace("@TARGET", target)
    return with_preamble(code, line, guard) + below.replace("@TOKEN", token)
