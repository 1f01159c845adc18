from table.reader import parse


def test_plain_fields():
    assert parse("a,b\n1,2\n") == [{"a": "1", "b": "2"}]
