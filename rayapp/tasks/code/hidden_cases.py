"""A code problem's hidden tests, and the comparison of actual with expected output. Outside the sandbox, and pure.

| comparison | data sets | white space | numbers | values of functions |
|---|---|---|---|---|
| lines | APPS, TACO, CodeContests and others whose grader is verl's prime_code | blank lines and the ends of lines don't count | integers exactly (without a sign also their leading zeros), others within 1e-5 of the expected value, or 1e-8 | JSON: a tuple is a list, keys are texts; a list of one value may stand for the value |
| decimals | LiveCodeBench | the ends of the output and of lines, and the space between numbers, don't count | exactly, as decimals: 1.50 is 1.5 | Python's `==`, but that a tuple is a list |

A line is compared as numbers only if all of its words are numbers; any other line must be the same text.
docs/datasets.md lists where these rules differ from the data sets' own graders, and why.

Tests are made by `formats.py` from a data row, and run by `scoring.py`. Only programs, standard input and arguments
enter a sandbox; expected values stay outside. The exception is `InsideTest`, whose verdicts are marked as forgeable.
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
# No nan, no exponent of four digits: the text may come from a hostile program.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,3})?")
_SPACE = re.compile(r"\s+")


def same_output(expected: str, comparison: Comparison, actual: str) -> bool:
    """True if a program's output is right; see the table above. The time is proportional to both texts' lengths."""
    if comparison == "lines":
        wanted, found = _filled_lines(expected), _filled_lines(actual)
        same_line = _is_close_line
    else:
        wanted, found = _stripped_lines(expected), _stripped_lines(actual)
        same_line = _is_line_of_same_decimals
    pairs = zip(wanted, found, strict=False)
    return len(wanted) == len(found) and all(left == right or same_line(left, right) for left, right in pairs)


def is_returned(expected: object, comparison: Comparison, values: Sequence[object]) -> bool:
    """True if the one value that a function returned is right; see the table above."""
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
        return False  # white space matters in patterns of stars or digits
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
"""Returns from the results of a test's calls whether the test is passed; if it raises, the test is failed.

Called in the text process: a function, or a `partial` of one, from a module that needs only the standard library.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """A program reads `stdin` and must write the expected output."""

    stdin: str
    is_expected: Callable[[str], bool]
    """Compares the program's output like the data set's checker."""
    max_output_bytes: int
    """Output limit; the program is stopped when it writes more."""
    expected: str = ""
    """The expected output, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """Calls of the function, and a condition that their results must satisfy (`text_process.holds`)."""

    calls: tuple[tuple[object, ...], ...]
    """Arguments of each call, plain data."""
    condition: Condition


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideTest:
    """Assertions that can't be separated from their calls: they run beside the candidate, which could forge them."""

    check: str
    """Python source of `def check(candidate)`, which raises if the candidate is wrong."""
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
    """The function may be a method of `class Solution`."""
    preamble: str = ""
    """Python code above the candidate's code, available to it."""
    has_usual_imports: bool = False
    """The candidate may also use the usual imports of competitive programming (`assembling.py`)."""
    num_public: int = 0
    """Number of tests, from the first, that the problem's text shows."""
    language: Language | None = None
    """Language of the program to write; None is Python."""
