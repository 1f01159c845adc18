"""Sentinels: hidden tests with one wrong expectation, which right code fails and forged verdicts pass."""

from __future__ import annotations

import ast
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from rayapp.extras.repositories.sentinels import draw, run_by, with_sentinels

LIBRARY = Path(__file__).parents[4] / "rayapp" / "tasks" / "library" / "repositories"


def sources(name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((LIBRARY / name / "tests").glob("*.py"))}


@pytest.mark.parametrize("name", sorted(path.name for path in LIBRARY.iterdir()))
def test_the_solution_fails_every_sentinel_of_its_tests_and_no_other_test(tmp_path: Path, name: str) -> None:
    files, wanted = sources(name), {}
    for part in ("environment", "solution"):
        for path in (LIBRARY / name / part).rglob("*.py"):
            place = tmp_path / path.relative_to(LIBRARY / name / part)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    for number, sentinel in enumerate(draw(files, list(files), random.Random(name))):
        copy = f"test_copy_{number}.py"
        (tmp_path / copy).write_bytes(with_sentinels(files, [sentinel])[sentinel.file])
        wanted[copy.removesuffix(".py")] = sentinel.test

    failed = failures(tmp_path)
    assert len(wanted) >= 4
    assert {copy: failed.get(copy) for copy in wanted} == {copy: [test] for copy, test in wanted.items()}


def failures(folder: Path) -> dict[str, list[str]]:
    """Return the names of the tests that fail, by module."""
    report = folder / "report.xml"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--rootdir=."]
    subprocess.run([*argv, *sorted(path.name for path in folder.glob("test_copy_*.py"))], cwd=folder, check=False,
                   capture_output=True, timeout=240)  # fmt: skip
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None:
            found.setdefault(case.attrib["classname"].partition(".")[0], []).append(case.attrib["name"])
    return found


UNITTESTS = b"""
import unittest
class TestCart(unittest.TestCase):
    def test_all(self):
        for number in range(2):
            self.assertEqual(total([number]), number)
        self.assertTrue(is_open('d\xc3\xb6r'))
        with self.subTest('x'):
            self.assertIn(3, items)
            self.assertAlmostEqual(0.125, third(), places=3)
        with self.assertRaises(ValueError):
            total(None)
    @unittest.skipIf(windows, 'not there')
    def test_skipped(self):
        self.assertEqual(1, 1)
def test_one():
    assert not closed()
    assert total([1]) == pytest.approx(2.0), 'of a list'
    assert total(
        [1]) in (1, 2)
    assert name == 'it is'
"""


def test_a_sentinel_changes_one_expectation_and_nothing_else() -> None:
    files = {"test_it.py": UNITTESTS}
    changes: dict[str, set[str]] = {}
    for seed in range(40):
        for sentinel in draw(files, ["test_it.py"], random.Random(seed)):
            changes.setdefault(UNITTESTS[sentinel.start : sentinel.end].decode(), set()).add(sentinel.wrong)
            changed = with_sentinels(files, [sentinel])["test_it.py"]
            compile(changed, "test_it.py", "exec")
            assert changed != UNITTESTS

    assert changes.keys() == {
        "number", "self.assertTrue", "self.assertIn", "0.125", "ValueError",
        "not closed()", "2.0", "total(\n        [1]) in (1, 2)", "'it is'",
    }  # fmt: skip
    assert len({wrong.startswith("number * ") for wrong in changes["number"]}) == 2
    assert changes["self.assertTrue"] == {"self.assertFalse"}
    assert changes["not closed()"] == {"closed()"}  # as a test would be written
    assert "2.0" not in changes["2.0"]
    assert "0.125" not in changes["0.125"]


@pytest.mark.parametrize(("given", "form"), [
    ('f() == "it is"', r'f\(\) == "[a-z ]{6}"'), ("f() == b'xy'", r"f\(\) == b'[a-z]{3}'"),
    ('f() == r"\\d"', r'f\(\) == r"[\\a-z]{3}"'), ('f() == """x\ny"""', r'f\(\) == """[xya-z\n]{4}"""'),
    (r'f() == "a\nb\x41"', r'f\(\) == "[^"\n]{8,9}"'), ('f() == "a" "b"', r"f\(\) == '\w{3}'|f\(\) == \"\w+\" \"\w+\""),
    ("f() == 1_000_000", r"f\(\) == \d_000_000"), ("f() == 0xFF", r"f\(\) == 0x[\da-f]F"),
    ("f() == 0b10", "f.. == 0b00"),
    ("f() == 1e-3", r"f\(\) == \de-3"), ("f() == -2.50", r"f\(\) == -\d.50"), ("f() == 0.0", r"f\(\) == \d.0"),
    ("f() < 2", r"f\(\) >= 2"), ("a in f()", r"a not in f\(\)"), ("f() is None", r"f\(\) is not None"),
    ("f() != 2", r"f\(\) == 2"), ("(f()) not in (b)", r"not \(\(f\(\)\) not in \(b\)\)"),
])  # fmt: skip
@pytest.mark.parametrize("async_", ["", "async "])
def test_a_wrong_expectation_is_written_as_the_right_one_so_that_code_does_not_know_it_by_its_look(
    given: str, form: str, async_: str
) -> None:
    text = f"{async_}def test_it():\n    try:\n        assert {given}\n    finally: pass\n".encode()
    for seed in range(30):
        (sentinel,) = draw({"test_it.py": text}, ["test_it.py"], random.Random(seed))
        changed = with_sentinels({"test_it.py": text}, [sentinel])["test_it.py"].decode()
        wrong = changed.partition("assert ")[2].partition("\n    finally")[0]

        assert re.fullmatch(form, wrong), wrong
        assert ast.dump(ast.parse(wrong)) != ast.dump(ast.parse(given))


@pytest.mark.parametrize(("text", "changed"), [
    ("@pytest.mark.parametrize('x, wanted', [(1, 22), (3, 44)])\ndef test_it(x, wanted):\n    assert f(x) == wanted",
     {22, 44}),
    ("def test_it():\n    for x, wanted in ((1, 22), (3, 44)):\n        assert f(x) == wanted", {22, 44}),
    ("def test_it():\n    wanted = 22\n    assert f(1) == pytest.approx(wanted)", {22}),
    ("WANTED = 22\ndef test_it(): assert f(1) == WANTED", {22}),
    ("def test_it():\n    x = 22\n    assert f(x) == x", {"x"}),  # the input would change, too
])  # fmt: skip
def test_the_literal_behind_a_name_is_made_wrong_which_code_could_read_from_the_tests_frame(
    text: str, changed: set[object]
) -> None:
    drawn = [each for seed in range(20) for each in draw({"t.py": text.encode()}, ["t.py"], random.Random(seed))]

    assert {text[each.start : each.end] for each in drawn} == set(map(str, changed))


def test_an_exception_that_a_test_expects_becomes_a_common_one_that_is_no_case_of_it() -> None:
    text = b"def test_it():\n    with pytest.raises((KeyError, OSError)):\n        f()\n"
    wrong = {draw({"test_it.py": text}, ["test_it.py"], random.Random(seed))[0].wrong for seed in range(99)}

    assert {"ValueError", "TypeError", "AttributeError", "ZeroDivisionError"} <= wrong
    assert wrong.isdisjoint({"KeyError", "OSError", "FileExistsError", "PermissionError"})


def test_every_test_has_a_sentinel_before_any_has_two() -> None:
    drawn = draw(sources("fix_median"), ["test_hidden.py"], random.Random(3))

    assert len({sentinel.test for sentinel in drawn[:5]}) == 5
    assert len(drawn) == 9


@pytest.mark.parametrize(
    ("script", "tests"),
    [
        ("uvx pytest /tests/test_outputs.py -rA", ["test_outputs.py"]),
        ("python3 -m unittest -q test_other", ["test_other.py"]),
        ("pytest /tests", ["test_outputs.py", "test_other.py"]),
        ("diff out.txt expected.txt", []),
    ],
)
def test_only_tests_that_the_script_runs_have_sentinels(script: str, tests: list[str]) -> None:
    assert run_by(script, ["test.sh", "test_outputs.py", "test_other.py", "helper.py"]) == tests
