from diffstat import diffstat

ONE = "--- a/x.py\n+++ b/x.py\n@@ -1,2 +1,3 @@\n kept\n-old\n+new\n+more\n"
GONE = "--- a/gone.txt\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-one\n-two\n"
DASHES = "--- a/sql/q.sql\n+++ b/sql/q.sql\n@@ -1,2 +1,2 @@\n--- a comment\n+++ another\n x\n"


def test_one_file():
    assert diffstat(ONE) == {"x.py": (2, 1)}


def test_several_files_in_order():
    assert list(diffstat(ONE + GONE).items()) == [("x.py", (2, 1)), ("gone.txt", (0, 2))]


def test_lines_that_look_like_headers():
    assert diffstat(DASHES) == {"sql/q.sql": (1, 1)}


def test_several_hunks_and_gits_own_lines():
    text = "diff --git a/n b/n\nindex 1..2 100644\n" + "--- a/n\n+++ b/n\n@@ -1 +1 @@\n-a\n+b\n@@ -9 +9,2 @@\n c\n+d\n"
    assert diffstat(text) == {"n": (2, 1)}


def test_nothing():
    assert diffstat("") == {}
