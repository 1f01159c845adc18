from table.reader import parse, parse_line


def test_commas_in_quotes():
    assert parse_line('"Smith, Anna",42') == ["Smith, Anna", "42"]
    assert parse_line('x,"a,b,c",y') == ["x", "a,b,c", "y"]


def test_quotes_in_quotes():
    assert parse_line('"she said ""no""",1') == ['she said "no"', "1"]
    assert parse_line('"""",z') == ['"', "z"]


def test_empty_fields():
    assert parse_line(',"",') == ["", "", ""]


def test_a_table():
    assert parse('name,motto\nIda,"one, two"\n') == [{"name": "Ida", "motto": "one, two"}]
