"""Assembles the program to run: a candidate's code (the code of an answer), code above it, and code that calls it.

`screen_answer` runs in the text process, so this module needs only the standard library. Names that it adds to the
candidate's module begin with `_rayapp`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rayapp.core.syntax import parse
from rayapp.tasks.banned import screen_module

RECURSION = "import sys; sys.setrecursionlimit(50000)"  # put above every solution
# Imports of the checkers of APPS, PRIME and LiveCodeBench. They take longer than most programs, so only code that uses
# one of the names gets them.
IMPORTS = (
    "from string import *; from re import *; from datetime import *; from collections import *; from heapq import *; "
    "from bisect import *; from copy import *; from math import *; from random import *; from statistics import *; "
    "from itertools import *; from functools import *; from operator import *; from io import *; from sys import *; "
    "from json import *; from builtins import *; from typing import *; import string, re, datetime, collections, "
    "heapq, bisect, copy, math, random, statistics, itertools, functools, operator, io, sys, json"
)
ENTRY = "_rayapp_entry"  # function that the sandbox calls; it calls the candidate's
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
# _CALL converts values: a Counter or a numpy number equals a plain value, but only plain values leave the sandbox.
_GUARD = """
def _rayapp_guard_@TOKEN():
    import importlib
    import builtins
    import sys
    from builtins import TypeError, dict, isinstance, list, set, setattr, tuple, type, vars
    from types import FunctionType
    modules = {name: importlib.import_module(name) for name in @MODULES}
    parts = [part for each in modules.values() for part in vars(each).values() if builtins.hasattr(part, "__dict__")]
    kinds = {kind for part in parts if isinstance(part, type) for kind in part.__mro__}
    others = [part for part in parts if not isinstance(part, (type, type(sys)))]
    kept = [(owner, dict(vars(owner))) for owner in (builtins, *modules.values(), *kinds, *others)]
    codes = [(part, part.__code__, part.__defaults__, part.__kwdefaults__)
             for _, names in kept for part in names.values() if isinstance(part, FunctionType)]
    bases = [(kind, kind.__bases__) for kind in kinds]
    loaded = sys.modules
    leaves = (type(None), builtins.bool, builtins.int, builtins.float, builtins.str, builtins.bytes)
    def restore():
        loaded.update(modules)
        for owner, names in kept:
            for name in vars(owner).keys() - names.keys() if not isinstance(owner, type(sys)) else ():
                builtins.delattr(owner, name)
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        for part, code, defaults, options in codes:
            part.__code__, part.__defaults__, part.__kwdefaults__ = code, defaults, options
        for kind, those in bases:
            if kind.__bases__ != those:
                kind.__bases__ = those
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
    """The code of an answer, or the verdict on an answer without code that can run."""

    code: str
    status: str  # of the verdict if the code can't run, else empty
    detail: str
    line: int  # below which other code may be inserted
    needs_imports: bool  # the code uses a name that only IMPORTS defines


def screen_answer(completion: str, function: str, prefill: str) -> tuple[str, str, str, int, bool]:
    """Extract and parse the code of an answer. Return the fields of `Screened` as a tuple, which the text process can
    send. `function` is empty for a whole program."""
    code, status, detail = screen_module(completion, function, prefill)
    tree = None if status else parse(code)
    if tree is None:
        return code, status, detail, 0, False
    return code, "", "", line_below_futures(tree), _needs_imports(tree)


def line_below_futures(tree: ast.Module) -> int:
    """Return the line in which the imports from `__future__` end, which must come first; 0 without any."""
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return max((node.end_lineno or 0 for node in imports if node.module == "__future__"), default=0)


def _needs_imports(tree: ast.Module) -> bool:
    # A name that is bound only inside a function counts as missing. The imports are then added needlessly.
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
    lines = code.split("\n")
    return "\n".join([*lines[:line], preamble, *lines[line:]]) if preamble else code


def callable_code(code: str, function: str, *, may_be_method: bool) -> str:
    """Return the code with an ENTRY that calls the candidate's function, or (`may_be_method`) that of `class Solution`,
    and returns its value as plain data."""
    method = f"Solution().{function} if b.hasattr(b.globals().get('Solution'), '{function}') else {function}"
    return code + _CALL.replace("@TARGET", f"({method})" if may_be_method else function)


def checked_code(code: str, line: int, function: str, check: str, modules: Sequence[str], token: str) -> str:
    """Return the code with an ENTRY that runs a check on the candidate's function. If it passes, ENTRY returns its
    argument.

    Builtins and the given modules are saved before the candidate's code runs, and restored after each call; only plain
    values reach the check. So a candidate can't pass by replacing `abs`, or by an object that equals everything. It can
    still forge a pass by searching the interpreter's frames. `token` can't be guessed.
    """
    guard = _GUARD.replace("@MODULES", repr(list(modules))).replace("@TOKEN", token)
    below = _CHECK.replace("@CHECK", textwrap.indent(check, "    ")).replace("@TARGET", function)
    return with_preamble(code, line, guard) + below.replace("@TOKEN", token)
