"""Rewards of answers: verl's rules, terms of form and tools, custom functions that fail in every way."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.agent import CodeSection
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.protocols import SandboxLease
from rayapp.core.types import Reward, SandboxSpec
from rayapp.tasks.answer_rules import CODE_SOURCES, GSM8K, NAMES, find_rule, format_term
from rayapp.tasks.answers import Answer, AnswerRewards, score_answer
from rayapp.tasks.custom_rewards import CustomReward, load_function
from rayapp.tasks.text_process import MAX_TEXT_CHARS, TextProcess
from rayapp.tasks.verdict import ToolRewards, Weights

STRICT = AnswerRewards()


class NoSandboxes:
    """A lender that must not be called."""

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> SandboxLease:
        raise AssertionError("nothing here is code")


NO_SANDBOXES = NoSandboxes()
CUSTOM = """
import asyncio, threading
import numpy as np
never = threading.Event()
def half(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5
async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": 1.0, "length": len(solution_str), "pred": "text"}
def lists(data_sources, solution_strs, ground_truths, extra_infos, **_):
    return [float(len(text)) for text in solution_strs]
async def lists_later(data_sources, solution_strs, ground_truths, extra_infos, **_):
    return lists(data_sources, solution_strs, ground_truths, extra_infos)
def raises(**_):
    raise ValueError("no idea")
def hangs(**_):
    never.wait()
async def hangs_async(**_):
    await asyncio.Event().wait()
def nan(**_):
    return float("nan")
def text(**_):
    return "good"
def no_score(**_):
    return {"reward": 1.0}
class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError
def raises_unreadable(**_):
    raise Unreadable
def exits(**_):
    raise SystemExit(3)
async def exits_async(**_):
    raise SystemExit(3)
def stops(**_):
    raise StopIteration
async def other_arguments(answer):
    return 1.0
async def cancels(**_):
    raise asyncio.CancelledError
def times_out(**_):
    raise TimeoutError("of its own")
def recurses(**_):
    return recurses()
def huge(**_):
    return 10**400
def beyond_float32(**_):
    return {"score": 1.0, "size": 1e300}
def an_array(**_):
    return np.zeros(3)
class Strange(dict):
    def items(self):
        raise RuntimeError("no items")
def strange(**_):
    return Strange(score=1.0)
class Key:
    def __str__(self):
        raise RuntimeError("no text")
def strange_key(**_):
    return {"score": 1.0, Key(): 1.0}
def scalars(**_):
    return {"score": np.float32(0.5), "bits": np.int64(3), "flag": np.bool_(True), "array": np.array([2.0]),
            "none": None, "nan": np.nan, "text": "1.5", "solved": float("nan")}
class Caller:
    async def __call__(self, **_):
        return 1.0
caller = Caller()
not_callable = 3
"""


@pytest.mark.parametrize("data_source", [name for name in NAMES if find_rule(name) is not None and name != "aime…"])
async def test_every_rule_reads_the_form_that_messages_name_for_it(data_source: str) -> None:
    rule = find_rule(data_source)
    assert rule is not None
    truth: Any = {"target": ["Paris", "paris"]} if rule.truth == "targets" else "72"
    right = rule.right_answer(truth)

    verdict = await score_answer(
        Answer(completion_text=right, data_source=data_source, ground_truth=truth, extra_info={}), STRICT, NO_SANDBOXES
    )

    assert verdict.value == 1.0
    assert rule.is_asked_for(f"Think, then end with {right}")


@pytest.mark.parametrize("data_source", [GSM8K, "lighteval/MATH", "math_dapo", "searchR1_nq"])
@pytest.mark.parametrize("said", ["<think>{}", "{}\n</think>\nNo.", "<think>{}\n</think>No.", "No.<think>{}"])
async def test_verls_rules_pay_a_draft_only_if_the_config_lets_them_read_thoughts(data_source: str, said: str) -> None:
    rule = find_rule(data_source)
    assert rule is not None
    truth: Any = {"target": ["Paris"]} if rule.truth == "targets" else "72"
    text = said.format(rule.right_answer(truth))
    answer = Answer(completion_text=text, data_source=data_source, ground_truth=truth, extra_info={})

    for reads_thoughts in (False, True):
        reward = await score_answer(answer, AnswerRewards(reads_thoughts=reads_thoughts), NO_SANDBOXES)
        assert reward.terms["solved"] == float(reads_thoughts)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    return path


async def verdict(text: str, rewards: AnswerRewards = STRICT, *, source: str = GSM8K, tool: float = 0.0) -> Reward:
    answer = Answer(completion_text=text, data_source=source, ground_truth="12", extra_info={})
    return await score_answer(answer, rewards, NO_SANDBOXES, tools=ToolRewards(calls=tool))


async def test_every_term_is_recorded_and_weighed() -> None:
    reward = await verdict("think\n#### 12", AnswerRewards(weights=Weights(format=0.2, tool=0.5)), tool=-0.05)

    assert reward.terms == {
        "pass_rate": 1.0, "score": 1.0, "solved": 1.0, "format": 1.0, "tool": -0.05,
        "tool_verdict": 0.0,
    }  # fmt: skip
    # 1.0 + 0.2 * 1.0 + 0.5 * -0.05
    assert reward.value == pytest.approx(1.175)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("x #### 12", 1.0), ("#### 1,200.5\n", 1.0), ("#### 1 #### 2", 0.0), ("#### 12 dollars", 0.0), ("12", 0.0)],
)
def test_the_format_term_wants_one_mark_at_the_end(text: str, expected: float) -> None:
    assert format_term(text) == expected


async def test_a_completion_that_is_a_program_does_not_run(tmp_path: Path) -> None:
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()"
    texts = [f"```python\n{code}\n```", f"\\boxed{{__import__('os').system('touch {tmp_path}/ran')+\\pi}}", code]

    for source in ("openai/gsm8k", "math", "lighteval/MATH", "aime2024"):
        for text in texts:
            assert (await verdict(text, source=source)).terms["solved"] == 0.0
    assert not (tmp_path / "ran").exists()


VERL = importlib.util.find_spec("verl")
assert VERL is not None
assert VERL.origin is not None
RULES = Path(VERL.origin).parent / "utils" / "reward_score"
PURE_IMPORTS = {"re", "random", "string", "typing.Optional"}
IMPURE_NAMES = {
    "eval", "exec", "compile", "open", "getattr", "globals", "vars", "__import__", "__builtins__", "__globals__",
}  # fmt: skip


def branches_of_verl() -> Iterator[tuple[list[str], str]]:
    """Yield data sources that verl's dispatcher knows (a prefix with a star), and the modules that it uses for them."""
    tree = ast.parse((RULES / "__init__.py").read_text())
    dispatch = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "default_compute_score")
    for node in ast.walk(dispatch):
        if not isinstance(node, ast.If) or "data_source" not in ast.unparse(node.test):
            continue
        prefixes = [
            call.args[0].value + "*"
            for call in ast.walk(node.test)
            if isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant)
        ]
        names = [c.value for c in ast.walk(node.test) if isinstance(c, ast.Constant) and f"{c.value}*" not in prefixes]
        body = ast.Module(body=node.body, type_ignores=[])
        taken = [i.names[0].name for i in ast.walk(body) if isinstance(i, ast.ImportFrom) and i.level == 1]
        yield [*names, *prefixes], "+".join(taken)


def test_no_completion_runs_outside_a_sandbox_whatever_data_source_of_verl_a_row_has() -> None:
    """A verl that adds a data source, or uses another module for one, must be reviewed again: see answer_rules.py."""
    found = {source: module for sources, module in branches_of_verl() for source in sources}
    refused = {
        "numina_aops_forum": "prime_math", "numina_synthetic_math": "prime_math", "numina_amc_aime": "prime_math",
        "numina_synthetic_amc": "prime_math", "numina_cn_k12": "prime_math", "numina_olympiads": "prime_math",
        "hiyouga/geometry3k": "geo3k",
    }  # fmt: skip
    in_sandboxes = dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "sandbox_fusion+prime_code")

    rules = {source: find_rule(source.replace("*", "_2024")) for source in found}
    pure = {source: rule.module for source, rule in rules.items() if rule is not None}

    # Each is scored by a rule that only works on strings (the next test), in a sandbox, or not at all.
    assert found == pure | in_sandboxes | refused
    assert all(STRICT.code_problem(source, "{}") is not None for source in in_sandboxes)
    for source in refused:
        with pytest.raises(InputError, match=rf"'{source}' has no scoring rule in rayapp.* reward\.custom"):
            STRICT.truth_kind(source)
    assert {name.replace("…", "*") for name in NAMES} == set(pure) | set(CODE_SOURCES)


def test_rows_of_ones_own_are_code_problems_where_the_configuration_says_so() -> None:
    rewards = AnswerRewards(code=CodeSection(sources=("mine",)))

    assert rewards.truth_kind("mine") == "tests"
    with pytest.raises(InputError, match=r"reward\.code\.sources"):
        STRICT.truth_kind("mine")
    # A user's own function precedes every rule.
    assert AnswerRewards(custom=CustomReward(path="m:f")).truth_kind("apps") == "any"


@pytest.mark.parametrize("module", ["gsm8k", "math_reward", "math_dapo", "search_r1_like_qa_em"])
def test_a_rule_that_is_used_only_works_on_strings(module: str) -> None:
    tree = ast.parse((RULES / f"{module}.py").read_text())
    imports, names = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                imports |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                imports |= {f"{node.module}.{alias.name}" for alias in node.names}
            case ast.Name(id=name) | ast.Attribute(attr=name):
                names.add(name)

    assert imports <= PURE_IMPORTS
    assert not names & IMPURE_NAMES


ANSWERS = [
    *("", "#### 12", "\\boxed{12}", "Answer: 12", "<answer>The 12</answer>", "\\boxed{13}", "<answer>13</answer>" * 9),
    *("#### 1\n#### 12", "it is 12", "#### 13", "####12", "no number"),
    "#### 12" + " " * 300,  # gsm8k looks at the last 300 characters only
]


@pytest.mark.parametrize("source", ["openai/gsm8k", "lighteval/MATH", "math_dapo", "aime2025", "searchR1_nq"])
async def test_rules_score_as_verls_dispatcher_does(source: str) -> None:
    from verl.utils.reward_score import default_compute_score

    truth: Any = {"target": ["12", "twelve"]} if source == "searchR1_nq" else "12"
    for text in ANSWERS:
        answer = Answer(completion_text=text, data_source=source, ground_truth=truth, extra_info={})
        found = default_compute_score(source, text, truth)
        expected = found["score"] if isinstance(found, dict) else found
        assert (await score_answer(answer, STRICT, NO_SANDBOXES)).value == expected, text


async def test_the_flexible_method_of_gsm8k_is_verls() -> None:
    from verl.utils.reward_score.gsm8k import compute_score

    found = [(await verdict(text, AnswerRewards(method="flexible"))).value for text in ANSWERS]
    assert found == [compute_score(text, "12", method="flexible") for text in ANSWERS]


@pytest.mark.parametrize(("source", "wrong"), [("searchR1_nq", 0.0), ("math", -1.0)])
async def test_a_text_that_takes_too_long_to_read_is_a_wrong_answer(
    monkeypatch: pytest.MonkeyPatch, source: str, wrong: float
) -> None:
    monkeypatch.setattr("rayapp.tasks.text_process._shared", TextProcess(cpu_limit_s=0.1))
    # Each opening looks for its end through all the rest. Of `math` only the last 300 characters are read.
    text = "<answer>" * 60_000 if source == "searchR1_nq" else "x" * (MAX_TEXT_CHARS + 1)
    answer = Answer(completion_text=text, data_source=source, ground_truth={"target": ["1"]}, extra_info={})

    reward = await score_answer(answer, STRICT, NO_SANDBOXES)

    assert (reward.value, reward.valid, reward.terms["solved"]) == (wrong, True, 0.0)
    assert reward.status == ("unreadable" if source == "searchR1_nq" else "too_long")


async def test_a_rule_that_raises_gives_no_verdict() -> None:
    answer = Answer(completion_text="<answer>1</answer>", data_source="searchR1_nq", ground_truth={}, extra_info={})

    reward = await score_answer(answer, STRICT, NO_SANDBOXES)

    assert (reward.valid, reward.failure_kind) == (False, "reward_error")
    assert "KeyError: 'target'" in reward.detail


async def test_a_reward_that_is_no_number_of_32_bits_gives_no_verdict() -> None:
    reward = await verdict("#### 12", AnswerRewards(weights=Weights(tool=1.0)), tool=math.inf)

    assert (reward.valid, reward.failure_kind) == (False, "reward_nonsense")


async def test_custom_functions_sync_and_async_replace_the_rule(module: Path) -> None:
    half = await verdict("x", AnswerRewards(custom=CustomReward(path=f"{module}:half")), source="mine")
    later = await verdict("xyz", AnswerRewards(custom=CustomReward(path=f"{module}:later")), source="mine")
    lists = await verdict("xyz", AnswerRewards(custom=CustomReward(path=f"{module}:lists")), source="mine")
    lists_later = await verdict("xyz", AnswerRewards(custom=CustomReward(path=f"{module}:lists_later")), source="mine")
    assert (lists.value, lists_later.value) == (3.0, 3.0), "functions of verl's batch manager take lists"
    called = await verdict("x", AnswerRewards(custom=CustomReward(path=f"{module}:caller")), source="mine")
    assert called.value == 1.0, "the call of an object may be a coroutine"

    assert (half.value, half.terms["solved"]) == (0.5, 0.0)
    assert (later.value, later.terms["length"], later.terms["solved"]) == (1.0, 3.0, 1.0)
    assert "pred" not in later.terms


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("raises", "reward_error", "ValueError: no idea"),
        ("hangs", "reward_timeout", "more than 0.05 s"),
        ("hangs_async", "reward_timeout", "more than 0.05 s"),
        ("nan", "reward_nonsense", "not a finite number"),
        ("text", "reward_nonsense", "'good'"),
        ("no_score", "reward_nonsense", "without the key `score`"),
        ("raises_unreadable", "reward_error", "Unreadable: (its message can't be read)"),
        ("exits", "reward_error", "SystemExit: 3"),
        ("exits_async", "reward_error", "SystemExit: 3"),
        ("stops", "reward_error", "StopIteration"),
        ("other_arguments", "reward_error", "unexpected keyword argument"),
        ("cancels", "reward_error", "CancelledError"),
        ("times_out", "reward_error", "TimeoutError: of its own"),
        ("recurses", "reward_error", "RecursionError"),
        ("huge", "reward_nonsense", "not finite as a 32-bit float"),
        ("beyond_float32", "reward_nonsense", "a size that is not finite"),
        ("an_array", "reward_nonsense", "array([0., 0., 0.]), which is not a finite number"),
        ("strange", "reward_nonsense", "no items"),
        ("strange_key", "reward_nonsense", "no text"),
    ],
)
async def test_a_custom_function_that_fails_gives_no_verdict(module: Path, name: str, kind: str, words: str) -> None:
    custom = CustomReward(path=f"{module}:{name}", timeout_s=0.05 if "hangs" in name else 30.0)

    reward = await verdict("x", AnswerRewards(custom=custom))

    assert (reward.valid, reward.failure_kind) == (False, kind)
    assert words in reward.detail


async def test_numbers_of_numpy_are_numbers_and_what_is_none_is_no_term(module: Path) -> None:
    reward = await verdict("x", AnswerRewards(custom=CustomReward(path=f"{module}:scalars")))

    own = {"pass_rate": 0.0, "solved": 0.0, "format": 0.0, "tool": 0.0, "tool_verdict": 0.0}
    assert reward.terms == {"score": 0.5, "bits": 3.0, "flag": 1.0, "array": 2.0, **own}
    assert all(type(value) is float for value in reward.terms.values())


async def test_a_cancelled_score_is_no_failure_of_the_function(module: Path) -> None:
    scoring = asyncio.create_task(verdict("x", AnswerRewards(custom=CustomReward(path=f"{module}:hangs_async"))))
    await asyncio.sleep(0)
    scoring.cancel()

    with pytest.raises(asyncio.CancelledError):
        await scoring


@pytest.mark.parametrize("path", ["nothing", "no.such.module:f", "math:nothing", ":f", "{}/no.py:f", "{}/exits.py:f"])
def test_a_function_that_is_not_there_or_whose_file_exits_is_named(path: str, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(3)")
    with pytest.raises(ConfigError, match="reward function"):
        load_function(path.format(tmp_path))


def test_a_file_may_have_models_whose_annotations_are_texts(tmp_path: Path) -> None:
    (tmp_path / "rated.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import KW_ONLY, dataclass\n"
        "from typing import Literal\n"
        "from pydantic import BaseModel\n"
        "class Rated(BaseModel):\n    stars: Literal[1, 2]\n"
        "@dataclass\nclass Kept:\n    stars: int\n    _: KW_ONLY\n    why: str = ''\n"
        "def f(stars):\n    return Kept(Rated(stars=stars).stars).stars\n"
    )

    assert load_function(f"{tmp_path}/rated.py:f")(2) == 2


def test_a_custom_reward_crosses_processes_after_it_was_loaded(module: Path) -> None:
    custom = CustomReward(path=f"{module}:half", timeout_s=3.0)
    custom.load()

    copy = pickle.loads(pickle.dumps(custom))

    assert (copy.path, copy.timeout_s) == (custom.path, 3.0)
    assert copy.load()(data_source="", solution_str="", ground_truth="") == 0.5
