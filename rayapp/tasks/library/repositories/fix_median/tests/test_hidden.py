import pytest
from stats import mean, median


def test_an_even_number_of_values():
    assert median([4, 1, 3, 2]) == 2.5
    assert median([10, 20]) == 15
    assert median([7, -3, 0, 12, 5, 5]) == 5


def test_an_odd_number_of_values():
    assert median([9, 2, 7]) == 7
    assert median([-4]) == -4


def test_the_list_stays_as_it_was():
    values = [5, 1, 9, 3]
    assert median(values) == 4
    assert values == [5, 1, 9, 3]


def test_an_empty_list():
    with pytest.raises(ValueError):
        median([])


def test_mean_is_as_before():
    assert mean([2, 4, 9]) == 5
