"""Hidden tests of a code problem, and the comparison of actual with expected output. Pure functions, which run outside
the sandbox.

| comparison | data sets | white space | numbers | values of functions |
|---|---|---|---|---|
| lines | APPS, TACO, CodeContests and others whose grader is verl's prime_code | blank lines and the ends of lines don't count | integers exactly (without a sign also their leading zeros), others with a difference of at most 1e-8 + 1e-5 times the expected value | JSON: a tuple is a list, keys are texts; a list of one value may stand for the value |
| decimals | LiveCodeBench | white space at the end of the output and of lines, and between numbers, doesn't count | exactly, as decimals: 1.50 is 1.5 | Python's `==`, except that a tuple equals a list |

A line is compared as numbers only if all of its words are numbers; any other line must be the same text.
tests/unit/tasks/test_graders.py lists where these rules differ from the data sets' own graders.

Tests are made by `formats.py` from a data row, and run by `scoring.py`. Only programs, standard input and arguments
enter a sandbox; expected values stay outside. Only an `InsideTest` takes its expected values into the sandbox; its
verdicts are marked as forgeable.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from rayapp.tasks.code.languages import Language

Comparison = Literal["lines", "decimals"]
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
_INTEGER = re.compile(r"[+-]?[0-9]+")
# Don't accept NaN, or exponents of four digits, as numbers: a hostile program may have written the text.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,3})?")
_SPACE = re.compile(r"\s+")


def same_output(expected: str, comparison: Comparison, actual: str) -> bool:
    """True if a program's output is right by the rules above. The time is linear in the lengths of both texts."""
    if comparison == "lines":
        wanted, found = _filled_lines(expected), _filled_lines(actual)
        same_line = _is_close_line
    else:
        wanted, found = _stripped_lines(expected), _stripped_lines(actual)
        same_line = _is_line_of_same_decimals
    pairs = zip(wanted, found, strict=False)
    return len(wanted) == len(found) and all(left == right or same_line(left, right) for left, right in pairs)


def is_returned(expected: object, comparison: Comparison, values: Sequence[object]) -> bool:
    """True if a function returned exactly one value, and it is right by the rules above."""
    (actual,) = values
    if comparison == "decimals":
        return expected == (list(actual) if isinstance(actual, tuple) else actual)
    wanted, found = _as_json(expected), _as_json(actual)
    return wanted == found or (isinstance(wanted, list) and len(wanted) == 1 and wanted[0] == found)


def _stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _filled_lines(text: str) -> list[str]:
    return [line for line in _stripped_lines(text) if line]


def _is_close_line(wanted: str, found: str) -> bool:
    if _SPACE.findall(wanted) != _SPACE.findall(found):
        return False  # lines that are not all numbers, such as patterns of stars, must have equal white space
    pairs = list(zip(wanted.split(), found.split(), strict=True))
    return all(_NUMBER.fullmatch(word) for pair in pairs for word in pair) and all(_is_close(*pair) for pair in pairs)


def _is_close(wanted: str, found: str) -> bool:
    if wanted.isdigit() and found.isdigit():
        return wanted == found
    if _INTEGER.fullmatch(wanted) and _INTEGER.fullmatch(found):
        return int(wanted) == int(found)
    return abs(float(wanted) - float(found)) <= _ABSOLUTE + _RELATIVE * abs(float(wanted))


def _is_line_of_same_decimals(wanted: str, found: str) -> bool:
    pair = wanted.split(), found.split()
    if len(pair[0]) != len(pair[1]) or not all(_NUMBER.fullmatch(word) for words in pair for word in words):
        return False
    return list(map(Decimal, pair[0])) == list(map(Decimal, pair[1]))


def _as_json(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value


# Function from the results of a test's calls to a true value if it passes; the test fails if this raises. It runs in
# the text process: a function (or `partial`) of a module that needs only the standard library.
Condition = Callable[[Sequence[object]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """Test of a program, which reads `stdin` and must write the expected output."""

    stdin: str
    is_expected: Callable[[str], bool]  # the rules of the data set's checker
    max_output_bytes: int  # a program that writes more is stopped
    expected: str = ""  # as messages show it


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """Test of a function: calls, and a condition on their results (`text_process.holds`)."""

    calls: tuple[tuple[object, ...], ...]  # arguments of each call, as plain data
    condition: Condition


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideTest:
    """Test of a function whose assertions run beside the candidate's code, which could forge their result."""

    check: str  # source of a function `check(candidate)`, which raises if the candidate is wrong
    modules: tuple[str, ...]  # that the check uses


Test = StdinTest | CallTest | InsideTest


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    tests: tuple[Test, ...]
    function: str = ""  # to write; empty for a whole program
    may_be_method: bool = False  # of `class Solution`
    preamble: str = ""  # runs before the candidate's code and defines names for it
    has_usual_imports: bool = False  # the candidate may use IMPORTS of `assembling.py`
    num_public: int = 0  # tests that the problem's text shows; they come first
    language: Language | None = None  # None for Python
