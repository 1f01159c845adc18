"""The rule `code_tests` in real sandboxes: what answers are worth, and what hostile ones try in vain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayapp.config.agent import CodeSection
from rayapp.core.types import Reward
from rayapp.sandbox.pool.client import PoolClient
from rayapp.tasks.code.scoring import CodeProblem

pytestmark = pytest.mark.asyncio(loop_scope="module")
SUMS = {"inputs": ["1 2\n", "30 4\n", "5 6\n"], "outputs": ["3\n", "34\n", "11\n"]}
PAIRS = {"inputs": ["[3, 1]", "[5]", "[]"], "outputs": ["[1, 3]", "[5]", "[]"], "fn_name": "order"}
SUM = "print(sum(map(int, input().split())))"
CYCLIC = {
    "prompt": "def encode(s):\n    return s[1:] + s[:1]\n\ndef decode(s):\n    '''Undo encode.'''\n",
    "entry_point": "decode",
    "test": "def check(candidate):\n    from random import randint\n    for _ in range(20):\n"
    "        text = ''.join(chr(97 + randint(0, 25)) for _ in range(9))\n"
    "        assert candidate(encode(text)) == text\n        assert abs(len(candidate(text)) - 9) < 1e-6\n",
}
DECODE = "def decode(s):\n    return s[-1:] + s[:-1]"


async def score(sandboxes: PoolClient, row: dict[str, Any], code: str, **rules: Any) -> Reward:
    problem = CodeProblem(ground_truth=json.dumps(row), rules=CodeSection(**rules))
    return await problem.score(f"Here it is:\n```python\n{code}\n```", sandboxes, seed=3)


@pytest.mark.parametrize(
    "code",
    [
        SUM,
        "from __future__ import annotations\nimport sys\na, b = sys.stdin.readline().split()\nprint(int(a) + int(b))",
        "def main():\n    print(sum(int(word) for word in input().split()))\nif __name__ == '__main__':\n    main()",
        # Names that the checkers of these data sets import for everybody.
        "print(reduce(lambda a, b: a + b, map(int, stdin.read().split())))",
        "def deep(n):\n    return 0 if n == 0 else 1 + deep(n - 1)\nassert deep(9000)\n" + SUM,
        SUM + "\nexit()",
        # What Python does when a script ends.
        SUM + "\nquit()",
        (
            f"import atexit, io, sys\nsys.stdout = io.StringIO()\n{SUM}\n"
            "@atexit.register\ndef write():\n    sys.__stdout__.write(sys.stdout.getvalue())"
        ),
        (
            "from concurrent.futures import ThreadPoolExecutor\nadded = ThreadPoolExecutor(1).submit(sum, map(int, "
            "input().split()))\nprint(added.result())"
        ),
    ],
)
async def test_a_right_program_earns_one(sandboxes: PoolClient, code: str) -> None:
    reward = await score(sandboxes, SUMS, code)

    assert (reward.value, reward.status, reward.detail) == (1.0, "scored", "")
    assert reward.terms == {"score": 1.0, "solved": 1.0, "pass_rate": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    "code",
    [
        "def order(items):\n    return sorted(items)",
        "class Solution:\n    def order(self, items: List[int]) -> List[int]:\n        return sorted(items)",
        "import collections\nlist_ = list\ndef order(items):\n    return tuple(sorted(items))\nlist = None",
    ],
)
async def test_a_right_function_or_method_earns_one(sandboxes: PoolClient, code: str) -> None:
    assert (await score(sandboxes, PAIRS, code)).value == 1.0


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("print(3)", "wrong output"),
        ("raise ValueError('no')", "ValueError: no"),
        ("import os; os._exit(0)", "wrong output"),
        ("import sys; print(3); sys.exit(1)", "SystemExit: 1"),
        ("while True: pass", "stopped for timeout"),
        ("while True: print('3' * 9999)", "stopped for output"),
        ("x = [0]\nwhile True: x += x", ""),
        # It searches all it can see for the expected output.
        (
            (
                "import glob\nfor path in glob.glob('/proc/*/[ec]*[en]*') + glob.glob('/tmp/*'):\n"
                "    try:\n        print(open(path).read())\n    except Exception:\n        pass"
            ),
            "wrong output",
        ),
        # It writes frames as the harness does, and ends before anything else is said.
        (
            (
                "import os, struct\nfor number in range(3, 20):\n    try:\n"
                '        frame = b\'["value",0,"3"]\'\n'
                '        os.write(number, struct.pack("<I", len(frame)) + frame)\n'
                "    except OSError:\n        pass\nos._exit(0)"
            ),
            "",
        ),
    ],
    ids=["constant", "raises", "exits early", "exits with 1", "loops", "floods", "memory", "reads /proc", "forges"],
)
async def test_a_program_that_gives_something_else_earns_nothing(sandboxes: PoolClient, code: str, detail: str) -> None:
    reward = await score(sandboxes, SUMS, code, test_timeout_s=3.0, memory_mib=128)

    assert (reward.value, reward.valid, reward.terms["solved"]) == (0.0, True, 0.0)
    assert detail in reward.detail
    assert (await score(sandboxes, SUMS, SUM)).value == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "class Any(list):\n    def __eq__(self, other): return True\ndef order(items):\n    return Any()",
        (
            "def order(items):\n    import os, struct\n    frame = b'[\"value\",0,[1,3]]'\n"
            "    for number in range(3, 20):\n        try:\n"
            "            os.write(number, struct.pack('<I', len(frame)) + frame)\n"
            "        except OSError:\n            pass\n    os._exit(0)"
        ),
        "def order(items):\n    raise SystemExit",
        (
            "import sys, types\nsys.modules['candidate'].__dict__['_rayapp_entry'] = lambda *a: [1, 3]\n"
            "def order(items):\n    return items"
        ),
    ],
    ids=["equals everything", "forges a frame", "exits", "replaces our entry"],
)
async def test_a_function_that_does_not_do_it_earns_nothing(sandboxes: PoolClient, code: str) -> None:
    assert (await score(sandboxes, PAIRS, code)).value == 0.0


async def test_with_shares_every_test_counts(sandboxes: PoolClient) -> None:
    reward = await score(sandboxes, SUMS, "a = input()\nprint(3 if a == '1 2' else 11)", score="share")

    assert reward.value == reward.terms["pass_rate"] == pytest.approx(2 / 3)
    assert reward.terms["solved"] == 0.0


async def test_tests_beyond_the_deadline_for_all_are_failed(sandboxes: PoolClient) -> None:
    code = "import time\ntime.sleep(0.3)\n" + SUM
    many = {name: 8 * texts for name, texts in SUMS.items()}

    reward = await score(sandboxes, many, code, score="share", test_timeout_s=0.6, max_tests=24)

    assert 0.0 < reward.value < 1.0


async def test_at_most_so_many_tests_run_and_all_of_a_group_see_the_same(sandboxes: PoolClient) -> None:
    # Right on the first test alone.
    code = "print(3)"

    drawn = [
        (
            await CodeProblem(ground_truth=json.dumps(SUMS), rules=CodeSection(max_tests=1)).score(
                code, sandboxes, seed=s
            )
        )
        for s in (0, 0, 1, 2, 3, 4)
    ]
    assert drawn[0].value == drawn[1].value
    assert {reward.value for reward in drawn} == {0.0, 1.0}


async def test_what_failed_before_runs_first(sandboxes: PoolClient) -> None:
    # A problem of its own, which no other test has failed.
    row = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "4"]}
    loud = "print(input())\nassert False, 'ran'"

    told = (await score(sandboxes, row, "print(input())")).detail
    assert told == r"wrong output: input '3': got '3\n', expected '4'"
    first = await score(
        sandboxes, row, "n = input()\nassert n != '3', 'the third ran first'\nassert False, 'not first'"
    )

    assert "the third ran first" in first.detail
    assert (await score(sandboxes, row, loud)).value == 0.0


@pytest.mark.parametrize(
    ("text", "status"),
    [("", "no_code"), ("```python\nprint(\n```", "syntax_error"), ("I can't do it.", "syntax_error")],
)
async def test_an_answer_without_code_that_parses_is_worth_nothing(
    sandboxes: PoolClient, text: str, status: str
) -> None:
    reward = await CodeProblem(ground_truth=json.dumps(SUMS)).score(text, sandboxes, seed=0)

    assert (reward.value, reward.status, reward.terms["format"]) == (0.0, status, 0.0)


async def test_a_check_that_runs_inside_is_passed_by_right_code_and_counted(sandboxes: PoolClient) -> None:
    reward = await score(sandboxes, CYCLIC, DECODE)

    assert (reward.value, reward.detail) == (1.0, "")
    assert reward.terms["verdict/forgeable"] == 1.0


@pytest.mark.parametrize(
    "code",
    [
        "def decode(s):\n    return s",
        "def encode(s):\n    return s\ndef decode(s):\n    return s",
        "def check(candidate):\n    pass\ndef decode(s):\n    return s",
        (
            "class Any(str):\n    def __eq__(self, other): return True\n    def __len__(self): return 9\n"
            "def decode(s):\n    return Any()"
        ),
        (
            "import builtins, random\nbuiltins.abs = lambda x: 0\nrandom.randint = lambda a, b: 0\n"
            "random.Random.randint = lambda self, a, b: 0\ndef decode(s):\n    return 'a' * 9"
        ),
        (
            "def decode(s):\n    import random\n    random.Random.randint = lambda *a: 0\n"
            "    random.randint = lambda *a: 0\n    return 'aaaaaaaaa'"
        ),
        "import random\nrandom.Random.getrandbits = lambda self, bits: 0\ndef decode(s):\n    return s",
        "import random\nrandom._inst._randbelow = lambda n: 0\ndef decode(s):\n    return s",
        "import random\nrandom.Random.randint.__code__ = (lambda self, a, b: 0).__code__\ndef decode(s):\n    return s",
        (
            "import random\nclass Zero(random._random.Random):\n    def getrandbits(self, bits): return 0\n"
            "random.Random.__bases__ = (Zero,)\ndef decode(s):\n    return s"
        ),
        (
            "import sys, types\nsys.modules['random'] = types.SimpleNamespace(randint=min, seed=id)\n"
            "def decode(s):\n    return s"
        ),
        "def decode(s):\n    raise SystemExit(0)",
        "AssertionError = None\n__builtins__['AssertionError'] = None\ndef decode(s):\n    return s",
        "def decode(s):\n    global _rayapp_entry\n    _rayapp_entry = lambda token: token\n    return s",
        "import sys\ndef decode(s):\n    sys.exit(0)",
        "def _rayapp_entry(token):\n    return token\ndef decode(s):\n    return s",
    ],
)
async def test_a_check_that_runs_inside_is_not_forged_cheaply(sandboxes: PoolClient, code: str) -> None:
    assert (await score(sandboxes, CYCLIC, code)).value == 0.0
