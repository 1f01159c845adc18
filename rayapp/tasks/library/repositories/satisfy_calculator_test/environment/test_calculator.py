import pytest
from calculator import evaluate


def test_times_before_plus():
    assert evaluate("1 + 2 * 3") == 7


def test_parentheses():
    assert evaluate("(1 + 2) * 3") == 9


def test_from_left_to_right():
    assert evaluate("10 - 4 - 3") == 3


def test_powers_from_right_to_left():
    assert evaluate("2 ^ 3 ^ 2") == 512


def test_signs():
    assert evaluate("-3 + 5") == 2


def test_fractions():
    assert evaluate("7 / 2") == 3.5


def test_nonsense():
    with pytest.raises(ValueError):
        evaluate("1 +")
