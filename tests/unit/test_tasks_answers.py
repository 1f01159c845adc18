"""Rewards of answers: verl's rules, terms of form and tools, custom functions that fail in every way."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from rayapp.data.problems import generate
from rayapp.errors import ConfigError, InputError
from rayapp.tasks.answers import GSM8K, Answer, AnswerRewards, format_term, score_answer
from rayapp.tasks.custom_rewards import CustomReward, load_function
from rayapp.types import Reward

STRICT = AnswerRewards()
CUSTOM = """
import asyncio, threading
never = threading.Event()
def half(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5
async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return {"score": 1.0, "length": len(solution_str), "pred": "text"}
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
not_callable = 3
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CUSTOM)
    return path


async def verdict(text: str, rewards: AnswerRewards = STRICT, *, source: str = GSM8K, tool: float = 0) -> Reward:
    answer = Answer(completion_text=text, data_source=source, ground_truth="12", extra_info={}, tool_reward=tool)
    return await score_answer(answer, rewards)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so it is\n#### 12", 1.0, 1.0),
        ("#### 1\n#### 12", 1.0, 1.0),
        ("it is 12", 0.0, 1.0),
        ("#### 13", 0.0, 0.0),
        ("####12", 0.0, 1.0),
        ("no number", 0.0, 0.0),
        ("", 0.0, 0.0),
        # Both methods look at the last 300 characters only.
        ("#### 12" + " " * 300, 0.0, 0.0),
    ],
)
async def test_gsm8k_is_scored_as_verl_does(text: str, strict: float, flexible: float) -> None:
    assert (await verdict(text)).value == strict
    assert (await verdict(text, AnswerRewards(method="flexible"))).value == flexible


async def test_a_readable_wrong_answer_may_be_worth_something_but_is_not_solved() -> None:
    reward = await verdict("#### 13", AnswerRewards(format_score=0.1))

    assert reward.value == 0.1
    assert reward.terms["solved"] == 0.0


async def test_every_term_is_recorded_and_weighed() -> None:
    reward = await verdict("think\n#### 12", AnswerRewards(format_weight=0.2, tool_weight=0.5), tool=-0.05)

    assert reward.terms == {"pass_rate": 1.0, "score": 1.0, "solved": 1.0, "format": 1.0, "tool": -0.05}
    # 1.0 + 0.2 * 1.0 + 0.5 * -0.05
    assert reward.value == pytest.approx(1.175)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("x #### 12", 1.0), ("#### 1,200.5\n", 1.0), ("#### 1 #### 2", 0.0), ("#### 12 dollars", 0.0), ("12", 0.0)],
)
def test_the_format_term_wants_one_mark_at_the_end(text: str, expected: float) -> None:
    assert format_term(text) == expected


async def test_the_worked_answers_of_the_shipped_problems_are_right() -> None:
    for problem in generate("test"):
        truth = problem["answer"].rpartition("#### ")[2]
        answer = Answer(completion_text=problem["answer"], data_source=GSM8K, ground_truth=truth, extra_info={})
        assert (await score_answer(answer, AnswerRewards())).value == 1.0


async def test_a_data_source_without_a_rule_is_named() -> None:
    with pytest.raises(InputError, match="verl has no rule"):
        await verdict("12", source="mine")


async def test_custom_functions_sync_and_async_replace_the_rule(module: Path) -> None:
    half = await verdict("x", AnswerRewards(custom=CustomReward(path=f"{module}:half")), source="mine")
    later = await verdict("xyz", AnswerRewards(custom=CustomReward(path=f"{module}:later")), source="mine")

    assert (half.value, half.terms["solved"]) == (0.5, 0.0)
    assert (later.value, later.terms["length"], later.terms["solved"]) == (1.0, 3.0, 1.0)
    assert "pred" not in later.terms


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("raises", "reward_error", "ValueError: no idea"),
        ("hangs", "reward_timeout", "over 0.05 s"),
        ("hangs_async", "reward_timeout", "over 0.05 s"),
        ("nan", "reward_nonsense", "no finite number"),
        ("text", "reward_nonsense", "'good'"),
        ("no_score", "reward_nonsense", "without score"),
    ],
)
async def test_a_custom_function_that_fails_gives_no_verdict(module: Path, name: str, kind: str, words: str) -> None:
    custom = CustomReward(path=f"{module}:{name}", timeout_s=0.05 if "hangs" in name else 30.0)

    reward = await verdict("x", AnswerRewards(custom=custom))

    assert (reward.valid, reward.failure_kind) == (False, kind)
    assert words in reward.detail


@pytest.mark.parametrize("path", ["nothing", "no.such.module:f", "/no/file.py:f", "math:nothing", ":f"])
def test_a_function_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match="reward function"):
        load_function(path)


def test_a_custom_reward_crosses_processes_after_it_was_loaded(module: Path) -> None:
    custom = CustomReward(path=f"{module}:half", timeout_s=3.0)
    custom.load()

    copy = pickle.loads(pickle.dumps(custom))

    assert (copy.path, copy.timeout_s) == (custom.path, 3.0)
    assert copy.load()(data_source="", solution_str="", ground_truth="") == 0.5
