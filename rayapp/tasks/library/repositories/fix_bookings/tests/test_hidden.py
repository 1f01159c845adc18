from bookings import free_days, overlaps


def test_departure_and_arrival_on_one_day():
    assert overlaps((1, 5), (5, 9)) is False
    assert overlaps((5, 9), (1, 5)) is False


def test_a_shared_night():
    assert overlaps((1, 5), (4, 6)) is True
    assert overlaps((3, 4), (1, 9)) is True
    assert overlaps((2, 3), (2, 3)) is True


def test_days_apart():
    assert overlaps((1, 2), (8, 9)) is False


def test_free_nights():
    assert free_days([], 0, 7) == 7
    assert free_days([(0, 3), (3, 5)], 0, 7) == 2
    assert free_days([(2, 4), (3, 6)], 0, 10) == 6
    assert free_days([(0, 20)], 5, 9) == 0
