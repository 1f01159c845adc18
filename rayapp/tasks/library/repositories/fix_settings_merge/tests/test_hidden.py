from settings import DEFAULTS, load, merged


def test_sections_are_merged():
    assert merged({"a": {"x": 1, "y": 2}, "b": 3}, {"a": {"y": 5}}) == {"a": {"x": 1, "y": 5}, "b": 3}


def test_at_every_depth():
    assert merged({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"e": 3}}}) == {"a": {"b": {"c": 1, "d": 2, "e": 3}}}


def test_other_values_are_replaced():
    assert merged({"a": [1, 2], "b": {"x": 1}}, {"a": [3], "b": None}) == {"a": [3], "b": None}
    assert merged({"a": 1}, {"a": {"x": 1}}) == {"a": {"x": 1}}


def test_the_defaults_stay():
    load({"server": {"port": 8080}})["server"]["paths"].append("/new")
    assert load({}) == {"server": {"host": "localhost", "port": 80, "paths": ["/"]}, "debug": False}
    assert DEFAULTS["server"]["port"] == 80


def test_the_changes_stay():
    changes = {"extra": {"on": True}}
    load(changes)["extra"]["on"] = False
    assert changes == {"extra": {"on": True}}
