"""Compares what a program printed, or a function returned, with what was expected. Outside the sandbox, and pure.

| comparison | whose | lines | numbers |
|---|---|---|---|
| lines | APPS, and with it TACO, CodeContests and verl's prime_code | blank lines and white space at both ends of a line don't count | integers exactly, others within 1e-5 of the expected value, or 1e-8 |
| decimals | LiveCodeBench | white space at both ends of the output and of a line doesn't count | exactly, as decimals: 1.50 is 1.5 |

`lines` differs from prime_code in two ways: a line of several numbers is compared number by number (there only a line of
one), and negative integers are compared exactly (there within the tolerance, by an oversight).
"""  # noqa: E501

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

Comparison = Literal["lines", "decimals"]
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
# No nan, no exponent of four digits: what is read is what a hostile program printed.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,400}(?:\.[0-9]{0,400})?|\.[0-9]{1,400})(?:[eE][+-]?[0-9]{1,3})?")


def same_output(expected: str, comparison: Comparison, actual: str) -> bool:
    """True where a program's output is right; see the table above. Takes time in proportion to both texts."""
    if comparison == "lines":
        wanted, found = _filled_lines(expected), _filled_lines(actual)
        same_number = _is_close
    else:
        wanted, found = _stripped_lines(expected), _stripped_lines(actual)
        same_number = _is_same_decimal

    def same_line(left: str, right: str) -> bool:
        pair = left.split(), right.split()
        return left == right or (len(pair[0]) == len(pair[1]) and all(map(same_number, *pair)))

    return len(wanted) == len(found) and all(map(same_line, wanted, found))


def same_json(expected: object, actual: object) -> bool:
    """True where a function's value is right: as JSON, which knows no tuples and only texts as keys.

    Data sets write some values as a list that holds the value: that counts, too.
    """
    wanted, found = _as_json(expected), _as_json(actual)
    return wanted == found or (isinstance(wanted, list) and len(wanted) == 1 and wanted[0] == found)


def _stripped_lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _filled_lines(text: str) -> list[str]:
    return [line for line in _stripped_lines(text) if line]


def _is_close(wanted: str, found: str) -> bool:
    if _INTEGER.fullmatch(wanted) and _INTEGER.fullmatch(found):
        return int(wanted) == int(found)
    if not (_NUMBER.fullmatch(wanted) and _NUMBER.fullmatch(found)):
        return wanted == found
    return abs(float(wanted) - float(found)) <= _ABSOLUTE + _RELATIVE * abs(float(wanted))


def _is_same_decimal(wanted: str, found: str) -> bool:
    if not (_NUMBER.fullmatch(wanted) and _NUMBER.fullmatch(found)):
        return wanted == found
    return Decimal(wanted) == Decimal(found)


def _as_json(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_as_json(part) for part in value]
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    return value
