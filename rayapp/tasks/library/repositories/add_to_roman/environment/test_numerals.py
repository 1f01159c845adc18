from numerals import from_roman


def test_from_roman():
    assert from_roman("XIV") == 14
