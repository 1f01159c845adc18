import pytest
from backoff import delays
from client import waits


def test_each_is_longer_than_the_one_before():
    assert delays(5) == [1.0, 2.0, 4.0, 8.0]
    assert delays(4, first=0.5, factor=3.0) == [0.5, 1.5, 4.5]


def test_none_is_longer_than_the_longest():
    assert delays(9) == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert delays(3, first=10.0, longest=7.0) == [7.0, 7.0]


def test_one_try_needs_no_wait():
    assert delays(1) == []


def test_no_try():
    with pytest.raises(ValueError):
        delays(0)


def test_the_client_uses_it():
    assert waits(4) == [1.0, 2.0, 4.0]
