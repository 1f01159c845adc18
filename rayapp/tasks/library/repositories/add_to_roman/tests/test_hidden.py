import pytest
from numerals import from_roman, to_roman


def test_small_numbers():
    assert [to_roman(number) for number in range(1, 11)] == ["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X"]


def test_large_numbers():
    assert to_roman(1994) == "MCMXCIV"
    assert to_roman(3999) == "MMMCMXCIX"
    assert to_roman(444) == "CDXLIV"


def test_there_and_back():
    assert [number for number in range(1, 4000, 37) if from_roman(to_roman(number)) != number] == []
    assert from_roman("MCMXC") == 1990


def test_other_numbers():
    with pytest.raises(ValueError):
        to_roman(0)
    with pytest.raises(ValueError):
        to_roman(4000)
    with pytest.raises(ValueError):
        to_roman(-5)
