from stats import mean, median


def test_mean():
    assert mean([1, 2, 6]) == 3


def test_median_of_an_odd_number():
    assert median([3, 1, 2]) == 2
