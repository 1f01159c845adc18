from slug import slugify


def test_words_are_joined_by_single_dashes():
    assert slugify("Hello,  World!") == "hello-world"
    assert slugify("--a__b--") == "a-b"


def test_accents_are_dropped():
    assert slugify("Cr\u00e8me Br\u00fbl\u00e9e") == "creme-brulee"


def test_a_title_is_cut_between_words():
    assert slugify("one two three four", longest=9) == "one-two"
    assert slugify("incomprehensible", longest=5) == "incom"


def test_nothing_is_left():
    assert slugify("!?") == "untitled"
