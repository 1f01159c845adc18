"""Type-exact comparison of sandbox results."""

from __future__ import annotations

import math

import pytest

from rayapp.sandbox.verdict.compare import equal, same_value


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (1, True),
        (1, 1.0),
        (True, 1),
        (0, False),
        ([1, 2], (1, 2)),
        ({1, 2}, [1, 2]),
        ({1: "a"}, {True: "a"}),
        ({1}, {1.0}),
        ({(1, 2)}, {(True, 2)}),
        ([1, [2, 3]], [1, [2, 3.0]]),
        ("1", b"1"),
        (None, 0),
        ([], ()),
        ({}, set()),
        ({1: None}, {2: None}),
        ([1, 2], [1, 2, 3]),
        (0.1, 0.1 + 1e-17 + 0.2),
    ],
)
def test_values_that_differ_in_type_or_content_are_unequal(expected: object, actual: object) -> None:
    assert not equal(expected, actual)
    assert not same_value(actual, expected)


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (math.nan, float("nan")),
        ([math.nan, {"a": math.nan}], [float("nan"), {"a": float("nan")}]),
        (0.0, -0.0),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, "a", (2, 3)}, {(2, 3), "a", 1}),
        ({float("nan")}, {float("nan")}),
        ({(1, "x"): [1]}, {(1, "x"): [1]}),
    ],
)
def test_the_same_data_is_equal(expected: object, actual: object) -> None:
    assert equal(expected, actual)


def test_an_object_that_equals_everything_does_not_pass() -> None:
    class Anything(int):
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            return True

    assert not equal(3, Anything(3))
    assert not equal([3], [Anything(3)])


def test_an_expected_value_that_is_no_plain_data_is_refused() -> None:
    with pytest.raises(TypeError, match="complex"):
        equal(1j, 1j)
