"""Compares a value from a sandbox with the expected value. Graders call this module outside the sandbox.

Types must be equal at every depth:

| expected | actual | equal |
|---|---|---|
| 1 | True, 1.0 | no: bool, int and float are three types |
| [1, 2] | (1, 2) | no: list and tuple differ, and so do list and set |
| nan | nan | yes: otherwise no answer could match |
| 0.0 | -0.0 | yes, as in Python; floats are otherwise compared bit for bit, without tolerance |
| {"a": 1, "b": 2} | {"b": 2, "a": 1} | yes: order of dict and set does not count |
| {1: "a"} | {True: "a"} | no: the types of keys must be equal, too |

Values are plain data that `codec.decode_value` rebuilt, so `==` on a leaf never runs foreign code. An actual value of
any other type is unequal and raises no exception.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Sequence

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 4, 120, 120, 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxdict = 24
_MAX_COLLISIONS = 100
_LEAVES = (bool, int, float, str, bytes, type(None))


def equal(expected: object, actual: object) -> bool:
    """True if both are the same plain data, by the rules above. TypeError: `expected` is not plain, an error of the
    task."""
    kind = type(expected)
    if kind not in (*_LEAVES, list, tuple, set, dict):
        raise TypeError(f"the expected value has the type {kind.__name__}: only plain data can be compared")
    if type(actual) is not kind:
        return False
    if isinstance(expected, list | tuple):
        assert isinstance(actual, list | tuple)
        return len(expected) == len(actual) and all(map(equal, expected, actual))
    if isinstance(expected, set):
        assert isinstance(actual, set)
        return len(expected) == len(actual) and set(map(_token, expected)) == set(map(_token, actual))
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        return _equal_dicts(expected, actual)
    return _equal_leaves(expected, actual)


def same_value(actual: object, expected: object) -> bool:
    """`equal` with the graders' order of arguments."""
    return equal(expected, actual)


def check_hashes(keys: Sequence[object]) -> None:
    """Raise a ValueError if keys are made to collide: making a dict of 100,000 multiples of 2**61 - 1 takes hours."""
    if len(keys) > _MAX_COLLISIONS and max(Counter(map(hash, keys)).values()) > _MAX_COLLISIONS:
        raise ValueError("more than 100 keys have the same hash")


def shown(value: object) -> str:
    """Format plain data for users: Python's repr, without the middle of long values."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python can't write out an integer of over 4,300 digits
        return "a number too long to write out"


def _equal_leaves(expected: object, actual: object) -> bool:
    return expected == actual or (expected != expected and actual != actual)


def _equal_dicts(expected: dict[object, object], actual: dict[object, object]) -> bool:
    if len(expected) != len(actual):
        return False
    values = {_token(key): value for key, value in actual.items()}
    missing = object()
    return all(equal(value, values.get(_token(key), missing)) for key, value in expected.items())


def _token(key: object) -> object:
    # Only equal data have equal tokens: 1, True and 1.0 differ.
    if isinstance(key, tuple):
        return ("tuple", *map(_token, key))
    if key != key:
        return ("nan",)
    return (type(key).__name__, key)
