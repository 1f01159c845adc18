"""Rows of code data sets as tests: every format, what each accepts, and rows that are refused."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from rayapp.core.errors import InputError
from rayapp.tasks.code.conditions import humaneval_tests, mbpp_tests
from rayapp.tasks.code.formats import read_tests
from rayapp.tasks.code.hidden_cases import CallTest, Comparison, InsideTest, StdinTest, is_returned, same_output
from rayapp.tasks.text_child import is_held
from rayapp.tasks.text_process import holds
from support.timing import takes_at_most_s

CASES = [
    {"input": "1 2\n", "output": "3\n", "testtype": "stdin"},
    {"input": "5 6", "output": "11", "testtype": "stdin"},
]


def encoded(value: object) -> str:
    """Encode as LiveCodeBench encodes its private cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def livecodebench(private: str, **fields: Any) -> dict[str, Any]:
    return {"public_test_cases": json.dumps(CASES[:1]), "private_test_cases": private, "metadata": "{}", **fields}


@pytest.mark.parametrize(
    "row",
    [
        {"inputs": ["1 2\n", "5 6"], "outputs": ["3\n", "11"]},
        {"inputs": [["1 2", ""], "5 6"], "outputs": [["3", ""], "11"], "fn_name": None},
        {"input_output": json.dumps({"inputs": ["1 2\n", "5 6"], "outputs": ["3\n", "11"]})},
        {
            "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
            "private_tests": {"input": [], "output": []},
            "generated_tests": [{"input": "5 6", "output": "11"}],
        },
        livecodebench(encoded(json.dumps(CASES[1:]))),
        livecodebench(json.dumps(CASES[1:])),
    ],
    ids=["PRIME", "PRIME in lines", "APPS", "CodeContests", "LiveCodeBench", "LiveCodeBench as JSON"],
)
def test_every_format_of_programs_comes_to_the_same_tests(row: dict[str, Any]) -> None:
    tests = read_tests(json.dumps(row))

    first, second = tests.tests
    assert isinstance(first, StdinTest)
    assert isinstance(second, StdinTest)
    assert (first.stdin, second.stdin) == ("1 2\n", "5 6")
    assert first.is_expected("3")
    assert not first.is_expected("11")
    assert second.is_expected("11\n")
    assert tests.function == ""


@pytest.mark.parametrize(
    "row",
    [
        {"inputs": ['"a"\n[1, 2]'], "outputs": ["[2, 1]"], "fn_name": "f"},
        {"inputs": [["a", [1, 2]]], "outputs": [[[2, 1]]], "fn_name": "f"},
        {
            "public_test_cases": json.dumps([{"input": '"a"\n[1, 2]', "output": "[2, 1]", "testtype": "functional"}]),
            "metadata": '{"func_name": "f"}',
        },
    ],
    ids=["PRIME", "APPS", "LiveCodeBench"],
)
def test_every_format_of_functions_comes_to_the_same_tests(row: dict[str, Any]) -> None:
    tests = read_tests(json.dumps(row))

    (test,) = tests.tests
    assert isinstance(test, CallTest)
    assert test.calls == (("a", [1, 2]),)
    assert is_held(test.condition, [(2, 1)])
    assert not is_held(test.condition, [[1, 2]])
    # If several values are expected, giving only the first is wrong.
    assert not is_held(test.condition, [2])
    assert tests.function == "f"


def test_the_public_tests_are_the_first_ones() -> None:
    assert read_tests(json.dumps(livecodebench(encoded(json.dumps(CASES[1:]))))).num_public == 1


def test_a_pickle_that_would_run_a_program_is_refused_and_does_not(tmp_path: Any) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "ran"), "w")

    for value in (Hostile(), ["a", "b"], 3, {"a": "b"}):
        with pytest.raises(InputError, match=r"private_test_cases can't be decoded: the pickle must hold exactly"):
            read_tests(json.dumps(livecodebench(encoded(value))))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError, match="private_test_cases can't be decoded"):
        read_tests(json.dumps(livecodebench(encoded(json.dumps(CASES))[:-8])))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("not json", "can't be read as JSON"),
        ("[1]", "must be an object"),
        ('{"a": 1}', "its ground_truth has no tests: it must have the fields inputs and outputs, not a"),
        ('{"inputs": [], "outputs": []}', "it has no tests: the list inputs is empty"),
        ('{"inputs": ["1"], "outputs": "2"}', "outputs must be a list"),
        ('{"inputs": ["1"], "outputs": [2]}', "each of its outputs must be a text"),
        ('{"inputs": ["1"], "outputs": ["2"], "fn_name": "a b"}', "fn_name must be the name of a function"),
        ('{"inputs": ["x"], "outputs": ["2"], "fn_name": "f"}', "inputs can't be read as JSON"),
        ('{"public_tests": {"input": ["1"], "output": []}}', "tests must have lists `input` and `output` of the same"),
        ('{"public_test_cases": "[{}]"}', "testtype stdin"),
        ('{"inputs": ["1"], "outputs": ["2"], "num_public": "x"}', "can't be read as a problem: ValueError"),
        ('{"inputs": ["1"], "outputs": ["2"], "fn_name": "class"}', "fn_name must be the name of a function"),
        ('{"public_test_cases": "5"}', "can't be read as a problem: TypeError"),
        ('{"test_list": [1]}', "can't be read as a problem: TypeError"),
        ('{"test_list": ["1 +"]}', "its test is not Python"),
        ('{"test_list": ["assert True"]}', "no assert in its tests calls a function"),
        (
            '{"entry_point": "f", "prompt": "def g():\\n", "test": "def check(c): pass"}',
            "does not end in the function f",
        ),
        ('{"entry_point": "f", "prompt": "def f():\\n", "test": "x = 1"}', "defines no function check"),
        ('{"entry_point": "f", "prompt": "def f():\\n", "test": "def check(c): pass"}', "it has no tests"),
    ],
)
def test_a_row_that_is_no_problem_says_why(row: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_tests(row)


@pytest.mark.parametrize(
    ("comparison", "expected", "actual", "is_same"),
    [
        ("lines", "1\n2", "2\n1", False),
        ("lines", "0.3333", "0.334", False),
        ("lines", "1", "1.0", True),
        ("lines", "1", "1 1", False),
        ("lines", "1", "nan", False),
        ("lines", "", "", True),
        ("lines", "1e400", "9e999", False),
        ("decimals", "0.333333", "0.3333331", False),
        ("decimals", "1\n\n2", "1\n2", False),
    ],
)
def test_output_is_compared_as_its_data_set_does(
    comparison: Comparison, expected: str, actual: str, is_same: bool
) -> None:
    """test_graders.py compares with the data sets' own graders; these are outputs that it does not draw."""
    assert same_output(expected, comparison, actual) is is_same


@pytest.mark.parametrize(
    ("expected", "actual", "is_same"),
    [
        ([1, 2], (1, 2), True),
        ([[1, 2]], [(1, 2)], True),
        ([3], 3, True),
        ([3, 5], 3, False),
        ({"1": "a"}, {1: "a"}, True),
        ("a", "b", False),
        (None, None, True),
    ],
)
def test_values_are_compared_as_json(expected: object, actual: object, is_same: bool) -> None:
    assert is_returned(expected, "lines", [actual]) is is_same


@pytest.mark.parametrize(
    ("assertion", "calls", "right", "wrong"),
    [
        ("f(1, 'a') == [1]", ((1, "a"),), [[1]], [[2]]),
        ("sum(10, 15) == 6", ((10, 15),), [6], [25]),  # a task's function may have the name of one of Python's
        ("set(f([1, 2])) == set([2, 1])", (([1, 2],),), [[1, 2, 1]], [[1]]),
        ("abs(f(1.5) - 1 / 3) < 1e-6", ((1.5,),), [0.33333333], [0.3]),
        ("math.isclose(f(2), 1.4142, rel_tol=0.001)", ((2,),), [1.414], [1.5]),
        ("not f(-3 * 2)", ((-6,),), [False], [True]),
        ("f(2) is True and f(3) == None", ((2,), (3,)), [True, None], [1, None]),
        ("f({'a': (1, {2})})", (({"a": (1, {2})},),), ["yes"], [""]),
        ("1 < f(2) <= 10 ** 2", ((2,),), [100], [101]),
        ("abs(f('x')) == 1", (("x",),), [-1], ["not a number"]),
    ],
)
def test_an_assert_is_taken_apart_and_judged_outside(
    assertion: str, calls: Any, right: list[object], wrong: list[object]
) -> None:
    tests = mbpp_tests([f"assert {assertion}"], "import math")

    (test,) = tests.tests
    assert isinstance(test, CallTest)
    assert (tests.function, test.calls) == ("sum" if "sum" in assertion else "f", calls)
    assert is_held(test.condition, right)
    assert not is_held(test.condition, wrong)


@pytest.mark.parametrize(
    ("assertion", "setup"),
    [
        ("f(root) == 1", "root = Node(1)"),
        ("f(f(1)) == 1", ""),
        ("f(x=1) == 1", ""),
        ("f(lambda x: x) == 1", ""),
        ("[f(x) for x in (1, 2)] == [1, 2]", ""),
        ("f(9 ** 9 ** 9) == 1", ""),
        ("f(*[1]) == 1", ""),
        ("f(1).strip() == ''", ""),
        # Constants that take long are not made.
        ("f(1) == sum([[0] * 1000] * 1200, [])", ""),
        ("f(1) == [[0] * 10000] * 10000", ""),
        (f"f(1) == [{'[0] * 100000, ' * 50}]", ""),
        ("f(1) == 10**300000 * 10**300000", ""),
    ],
)
def test_an_assert_that_cannot_be_taken_apart_runs_inside(assertion: str, setup: str) -> None:
    with takes_at_most_s(8):
        (test,) = mbpp_tests([f"assert {assertion}"], setup).tests

    assert isinstance(test, InsideTest)


def test_a_check_with_a_loop_runs_inside_with_the_prompts_own_helpers() -> None:
    prompt = "import math\ndef twice(x):\n    return 2 * x\ndef f(x):\n    '''Half.'''\n"
    check = (
        "def check(candidate):\n    import random\n    for x in range(3):\n        assert candidate(twice(x)) == x\n"
    )

    tests = humaneval_tests(prompt, "f", check)

    (test,) = tests.tests
    assert isinstance(test, InsideTest)
    assert "def twice" in test.check
    assert test.modules == ("math", "random")
    assert tests.preamble.startswith("import math")


def test_numbers_may_be_printed_with_all_their_digits() -> None:
    (test,) = read_tests(json.dumps({"inputs": [""], "outputs": ["0.3\n" * 20_000]})).tests
    assert isinstance(test, StdinTest)

    printed = "0.30000000000000004\n" * 20_000
    assert len(printed) < test.max_output_bytes
    assert test.is_expected(printed)


async def test_a_condition_that_takes_long_holds_nothing_up_and_is_not_met() -> None:
    (test,) = mbpp_tests([f"assert f(1) == {' + '.join(['f(2)'] * 80)} + [0]"], "").tests
    assert isinstance(test, CallTest)
    values = [[1]] + [[0] * 12_000] * 80
    judging, turns = asyncio.create_task(holds(test.condition, values)), 0
    while not judging.done():
        await asyncio.sleep(0)
        turns += 1

    assert not judging.result()
    assert turns > 100


def test_a_value_made_to_collide_does_not_hold_up_the_comparison() -> None:
    (test,) = mbpp_tests(["assert set(f(1)) == {1}"], "").tests
    assert isinstance(test, CallTest)

    assert not is_held(test.condition, [[number * (2**61 - 1) for number in range(100_000)]])
