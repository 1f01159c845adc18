from cache import Cache


def filled(size, keys):
    cache = Cache(size)
    for key in keys:
        cache.put(key, key.upper())
    return cache


def test_reading_is_a_use():
    cache = filled(2, "ab")
    assert cache.get("a") == "A"
    cache.put("c", "C")
    assert cache.keys() == ["a", "c"]
    assert cache.get("b", "gone") == "gone"


def test_writing_again_is_a_use():
    cache = filled(3, "abc")
    cache.put("a", "new")
    cache.put("d", "D")
    assert cache.keys() == ["c", "a", "d"]
    assert cache.get("a") == "new"


def test_reading_what_is_not_there_is_none():
    cache = filled(2, "xy")
    assert cache.get("z", 0) == 0
    assert cache.keys() == ["x", "y"]


def test_a_long_run():
    assert filled(3, "abcabdeb").keys() == ["d", "e", "b"]
