import pytest
from calculator import evaluate


def test_times_before_plus():
    assert evaluate("2*3+4*5") == 26
    assert evaluate("20 - 2 * 3 - 1") == 13


def test_parentheses():
    assert evaluate("((2))*(3+(4-1))") == 12


def test_from_left_to_right():
    assert evaluate("100 / 10 / 5") == 2
    assert evaluate("8 - 5 + 2") == 5


def test_powers():
    assert evaluate("2 ^ 2 ^ 3") == 256
    assert evaluate("3 * 2 ^ 3") == 24


def test_signs():
    assert evaluate("-(4 - 6)") == 2
    assert evaluate("3 * -2") == -6
    assert evaluate("--5") == 5


def test_fractions():
    assert evaluate("1.5 + .25") == 1.75


def test_nonsense():
    with pytest.raises(ValueError):
        evaluate("(1 + 2")
    with pytest.raises(ValueError):
        evaluate("2 $ 3")
    with pytest.raises(ValueError):
        evaluate("")
