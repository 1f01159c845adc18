from slug import slugify


def test_words_are_joined_by_single_dashes():
    assert slugify("Rock & Roll -- 1955") == "rock-roll-1955"
    assert slugify("  tabs\tand\nlines ") == "tabs-and-lines"
    assert slugify("snake_case_title") == "snake-case-title"


def test_accents_are_dropped():
    assert slugify("\u00c5ngstr\u00f6m na\u00efve") == "angstrom-naive"


def test_a_title_is_cut_between_words():
    assert slugify("a quick brown fox", longest=12) == "a-quick"
    assert slugify("a quick brown fox", longest=13) == "a-quick-brown"
    assert slugify("unbreakable word", longest=4) == "unbr"
    assert slugify("short", longest=100) == "short"


def test_nothing_is_left():
    assert slugify("") == "untitled"
    assert slugify("---") == "untitled"
