"""Hidden tests of a code problem, and the comparison of actual with expected output. Pure functions, which run outside
the sandbox.

| comparison | data sets | white space | numbers | values of functions |
|---|---|---|---|---|
| lines | APPS, TACO, CodeContests and others whose grader is verl's prime_code | blank lines and the ends of lines don't count | integers exactly (without a sign also their leading zeros), others with a difference of at most 1e-8 + 1e-5 times the expected value | JSON: a tuple is a list, keys are texts; a list of one value may stand for the value |
| decimals | LiveCodeBench | white space at the end of the output and of lines, and between numbers, doesn't count | exactly, as decimals: 1.50 is 1.5 | Python's `==`, except that a tuple equals a list |

A line is compared as numbers only if all of its words are numbers; any other line must be the same text.
docs/datasets.md lists where these rules differ from the data sets' own graders, and why.

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
    """Return True if a program's output is right by the rules in this module's table. The time is linear in the lengths
    of both texts.
    """
    if comparison == "lines":
        wanted, found = _filled_lines(expected), _filled_lines(actual)
        same_line = _is_close_line
    else:
        wanted, found = _stripped_lines(expected), _stripped_lines(actual)
        same_line = _is_line_of_same_decimals
    pairs = zip(wanted, found, strict=False)
    return len(wanted) == len(found) and all(left == right or same_line(left, right) for left, right in pairs)


def is_returned(expected: object, comparison: Comparison, values: Sequence[object]) -> bool:
    """Return True if a function returned exactly one value, and it is right by the rules in this module's table."""
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


Condition = Callable[[Sequence[object]], object]
"""Function that takes the results of a test's calls, and returns a true value if the test passes. If the function
raises, the test fails.

A condition runs in the text process. Therefore it must be a function, or a `partial` of a function, in a module that
needs only the standard library.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """Test of a program, which reads `stdin` and must write the expected output."""

    stdin: str
    is_expected: Callable[[str], bool]
    """Function that returns True if a program's output is right by the rules of the data set's checker."""
    max_output_bytes: int
    """Maximum bytes of output. A program that writes more is stopped."""
    expected: str = ""
    """Expected output, as messages show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """Test of a function: calls, and a condition that the calls' results must satisfy. `text_process.holds` checks
    it.
    """

    calls: tuple[tuple[object, ...], ...]
    """Arguments of each call, as plain data."""
    condition: Condition


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideTest:
    """Test of a function whose assertions can't be separated from its calls. The assertions run beside the candidate's
    code, which could forge their result.
    """

    check: str
    """Python source of a function `check(candidate)`, which raises if the candidate is wrong."""
    modules: tuple[str, ...]
    """Modules that the check uses."""


Test = StdinTest | CallTest | InsideTest


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTests:
    """The tests of one problem."""

    tests: tuple[Test, ...]
    function: str = ""
    """Name of the function to write; empty for a whole program."""
    may_be_method: bool = False
    """True if the function may be a method of `class Solution`."""
    preamble: str = ""
    """Python code that runs before the candidate's code and defines names for it."""
    has_usual_imports: bool = False
    """True if the candidate may use names of the usual imports of competitive programming (IMPORTS in
    `assembling.py`)."""
    num_public: int = 0
    """Number of tests that the problem's text shows. They come first in `tests`."""
    language: Language | None = None
    """Language of the program to write; None for Python."""
