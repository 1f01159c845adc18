"""Banned names are found in the parsed code however they are reached, and nowhere else."""

from __future__ import annotations

import pytest

from rayapp.tasks.banned import find_banned, normal_pattern
from support.timing import takes_at_most_s

PATTERNS = ("sorted(", ".sort(", "heapq", "import ", "__import__")

USES = {
    "a call": "def f(xs): return sorted(xs)",
    "a method": "def f(xs):\n    xs.sort()\n    return xs",
    "an alias": "s = sorted\ndef f(xs): return s(xs)",
    "a method taken from its class": "go = list.sort\ndef f(xs): return go(xs)",
    "a default argument": "def f(xs, s=sorted):\n    sorted = 1\n    return s(xs)",
    "a decorator": "@sorted\ndef f(xs): return xs",
    "an argument of map": "def f(xs): return list(map(sorted, [xs]))[0]",
    "an import": "import heapq as h\ndef f(xs): return h.nsmallest(9, xs)",
    "an import inside": "def f(xs):\n    from heapq import heappush\n    return xs",
    "an import by function": "def f(xs): return __import__('heapq').nsmallest(9, xs)",
    "an import of the builtin": "from builtins import sorted as s\ndef f(xs): return s(xs)",
    "getattr": "def f(xs): return getattr(xs, 'sort')()",
    "text put together": "def f(xs): return getattr(xs, 'so' + f'{\"r\"}t')()",
    "an unreadable getattr": "def f(xs): return getattr(xs, xs.__doc__[3:7])()",
    "a constant object with an unreadable name": "def f(xs): return getattr('', chr(99))",
    "getattr by another name": "g = getattr\ndef f(xs): return g(xs, 'sort')()",
    "eval": "def f(xs): return eval('sor' + 'ted(xs)')",
    "eval of eval": "def f(xs): return eval(\"eval('sorted')\")(xs)",
    "eval of computed text": "def f(xs): return eval(chr(115) + 'orted')(xs)",
    "exec": "exec('def g(x): return sorted(x)')\ndef f(xs): return g(xs)",
    "__builtins__ as a dict": "def f(xs): return __builtins__['sorted'](xs)",
    "__builtins__ as a module": "def f(xs): return __builtins__.sorted(xs)",
    "__builtins__ through globals": "def f(xs): return f.__globals__['__builtins__']['sorted'](xs)",
    "globals": "def f(xs): return globals()['__builtins__'].sorted(xs)",
    "a builtin's module": "def f(xs): return print.__self__.sorted(xs)",
    "vars": "def f(xs): return vars(list)['sort'](xs)",
    "vars with get": "def f(xs): return vars(list).get('sort')(xs)",
    "all of vars": "def f(xs): return [v for k, v in vars(list).items() if len(k) == 4]",
    "__dict__": "def f(xs): return list.__dict__['sort'](xs)",
    "__getattribute__": "def f(xs): return object.__getattribute__(xs, 'sort')()",
    "a class pattern": "def f(xs):\n    match xs:\n        case object(sort=g):\n            g()\n    return xs",
    "__match_args__": "class L(list):\n    __match_args__ = ('so' 'rt',)\ndef f(xs): return xs",
    "a module's globals after a global statement": "def f(xs):\n    global sorted\n    return sorted(xs)",
    "a comprehension that shadows too late": "def f(xs): return [0 for sorted in sorted(xs)]",
    "one lambda's parameter, another's builtin": "def f(xs): return (lambda sorted: 0, lambda x: sorted(x))[1](xs)",
    "a class body that falls back": (
        "def f(xs):\n    class A:\n        s = sorted\n        sorted = 1\n    return A.s(xs)"
    ),
    "a module name that may not be bound": "if 0:\n    sorted = None\ndef f(xs): return sorted(xs)",
    "a super call": "class L(list):\n    def go(self): super().sort()\ndef f(xs): return xs",
    "a walrus": "def f(xs): return (s := sorted)(xs)",
    "a nested function": "def f(xs):\n    def g():\n        return sorted(xs)\n    return g()",
}

HONEST = {
    "a comment": "def f(xs):\n    # like sorted(xs), without import\n    return xs",
    "a docstring": "def f(xs):\n    'Like sorted(xs) or xs.sort(); import nothing.'\n    return xs",
    "a string": "def f(xs):\n    print('sorted(', 'sort', 'heapq')\n    return xs",
    "a flag": "def f(xs):\n    sorted = False\n    while not sorted:\n        sorted = True\n    return xs",
    "a flag seen from inside": "def f(xs):\n    sorted = False\n    def g(): return sorted\n    return g()",
    "a parameter": "def f(sorted): return [x for x in sorted]",
    "longer names": "def f(xs):\n    sorted_xs = resort(xs)\n    return sorted_xs\ndef resort(x): return x",
    "a constant attribute": "def f(xs): return getattr(xs, 'copy')()",
    "a regex": "def f(xs, re): return re.compile(xs)",
    "dict methods": "def f(xs):\n    d = {}\n    return d.get('sort', d.pop(xs, None))",
    "evaluated arithmetic": "def f(xs): return eval('1 + 2')",
}


@pytest.mark.parametrize("code", USES.values(), ids=USES.keys())
def test_use_is_found(code: str) -> None:
    assert find_banned(code, PATTERNS) is not None


@pytest.mark.parametrize("code", HONEST.values(), ids=HONEST.keys())
def test_honest_code_is_left_alone(code: str) -> None:
    assert find_banned(code, PATTERNS) is None


def test_code_nested_too_deeply_to_read_counts_as_a_dynamic_lookup() -> None:
    text = " + ".join(["'a'"] * 1500)

    assert find_banned(f"def f(xs): return getattr(xs, {text})", PATTERNS) is not None


@pytest.mark.parametrize(
    "lines",
    [
        ["    x" + ".a" * 2900] * 5,
        ["    " + ";".join("x" * 10_000)],
        ["    return " + "lambda:" * 80 + "[" + "x," * 10_000 + "]"],
        ["    " + "+".join("x" * 900)] * 11,
        ["    def g():", "        global x; x"] * 2000,
        ["    from a import " + ",".join("b" * 10_000)],
    ],
    ids=["attributes", "statements", "lambdas", "sums", "functions", "imports"],
)
def test_long_code_is_read_in_linear_time(lines: list[str]) -> None:
    source = "\n".join(["def f(x):", *lines])

    with takes_at_most_s(1.5):  # quadratic: 3 to 60
        assert find_banned(source, ("sorted", "os.path")) is None


@pytest.mark.parametrize(
    ("code", "patterns", "found"),
    [
        ("import os.path.b.c.d", ("os.path",), "os.path"),
        ("from os.path.b import c", ("os.path",), "os.path"),
        ("import os\nos.path.join", ("os.path",), "os.path"),
        ("from os import path as p", ("os.path",), "os.path"),
        ("import os\nos.sep", ("os.path",), None),
        ("import a.os.path.b", ("os.path",), None),
        ("from math import pi", ("import",), "import"),
        ("important = 1", ("import",), None),
        ("def f(x, xs): return x not in xs", ("not  in",), "not  in"),
        ("def f(x, xs):\n    for y in xs:\n        return y is x", ("in", "is not"), None),
        ("def double(x, *args, **more): return x + x ** 1 << -1", ("*", "-", "not in"), None),
        ("import heapq\nx = eval(input())", (), None),
        ("def f(:", PATTERNS, None),
    ],
)
def test_a_pattern_bans_what_it_names_and_nothing_else(code: str, patterns: tuple[str, ...], found: str | None) -> None:
    assert find_banned(code, patterns) == found


@pytest.mark.parametrize(
    "code",
    [
        "def double(x): return x * 2",
        "def double(x):\n    x *= 2\n    return x",
        "def double(x): return x.__mul__(2)",
        "def double(x): return int.__rmul__(x, 2)",
        "def double(x): return getattr(x, '__mul__')(2)",
        "from operator import mul\ndef double(x): return mul(x, 2)",
        "import operator\ndef double(x): return operator.imul(x, 2)",
        "def double(x): return eval('x * 2')",
    ],
)
def test_a_banned_operator_is_found_however_it_is_written(code: str) -> None:
    assert find_banned(code, ("*",)) == "*"


@pytest.mark.parametrize("pattern", ["", "a b", "sorted()", "(", "x..y", "for", "lambda", "True", "not not"])
def test_pattern_that_names_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is neither a name nor an operator"):
        normal_pattern(pattern)
