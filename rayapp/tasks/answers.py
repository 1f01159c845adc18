"""What a completion for a row of data is worth: verl's rule for its data source, and terms of form, tools and users.

    completion, row -> {correct, format, tool, custom terms} -> Reward(value = weighted sum, terms = all of them)

Called by the agent loop after the last turn. Scores are verl's own functions, imported when first used.
Never raises for what the completion says or what a custom function does.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayapp.errors import InputError
from rayapp.tasks.custom_rewards import CustomReward, RewardFailedError
from rayapp.types import Reward

GSM8K = "openai/gsm8k"
Method = Literal["strict", "flexible"]
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_ENDS_MARKED = re.compile(r"#### -?[0-9][0-9.,]*\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRewards:
    """Which terms count how much. Every term is recorded, also those that weigh nothing."""

    method: Method = "strict"
    """verl's: `strict` wants `#### N`, `flexible` takes the last number. Both look at the last 300 characters."""
    format_score: float = 0.0
    """For a wrong answer that could be read (verl's name)."""
    correct_score: float = 1.0
    format_weight: float = 0.0
    """Of the term `format`: 1 where the completion has one `#### N`, at its very end."""
    tool_weight: float = 0.0
    """Of the term `tool`: the sum of the rewards that the tools gave on the way."""
    custom: CustomReward | None = None
    """Replaces the rule of the data source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion with what its row says."""

    completion_text: str
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    tool_reward: float = 0.0


async def score_answer(answer: Answer, rewards: AnswerRewards) -> Reward:
    """The verdict. `terms["solved"]` and `terms["pass_rate"]` are 1 where the answer is right.

    Raises:
        InputError: no rule for this data source, and no custom function: a mistake of the config, not of the policy.
    """
    started = time.perf_counter()
    try:
        terms = await _main_terms(answer, rewards)
    except RewardFailedError as error:
        return Reward.invalid(error.kind, str(error))
    terms |= {"format": format_term(answer.completion_text), "tool": answer.tool_reward}
    value = terms["score"] + rewards.format_weight * terms["format"] + rewards.tool_weight * terms["tool"]
    return Reward(value=value, terms=terms, time_score_s=time.perf_counter() - started)


def load_rules() -> None:
    """Import verl's rules now. It takes seconds, and the first `score_answer` would take them from the event loop."""
    importlib.import_module("verl.utils.reward_score.gsm8k")


def format_term(completion_text: str) -> float:
    """1.0 if the text has exactly one `#### N` and ends with it, else 0.0."""
    return float(len(_MARKED.findall(completion_text)) == 1 and bool(_ENDS_MARKED.search(completion_text)))


def gsm8k_score(completion_text: str, ground_truth: str, rewards: AnswerRewards) -> float:
    """verl's `gsm8k.compute_score`."""
    from verl.utils.reward_score import gsm8k

    return float(
        gsm8k.compute_score(
            completion_text,
            ground_truth,
            method=rewards.method,
            format_score=rewards.format_score,
            score=rewards.correct_score,
        )
    )


async def _main_terms(answer: Answer, rewards: AnswerRewards) -> dict[str, float]:
    if rewards.custom is not None:
        terms = await rewards.custom(
            data_source=answer.data_source,
            solution_str=answer.completion_text,
            ground_truth=answer.ground_truth,
            extra_info=answer.extra_info,
        )
        solved = float(terms.get("solved", terms["score"] >= 1.0))
    elif answer.data_source == GSM8K:
        terms = {"score": gsm8k_score(answer.completion_text, str(answer.ground_truth), rewards)}
        only_right = AnswerRewards(method=rewards.method)
        solved = gsm8k_score(answer.completion_text, str(answer.ground_truth), only_right)
    else:
        terms = {"score": _verl_score(answer)}
        solved = float(terms["score"] >= 1.0)
    return {"pass_rate": solved, **terms, "solved": solved}


def _verl_score(answer: Answer) -> float:
    """verl's rule for any other data source that it knows."""
    from verl.utils.reward_score import default_compute_score

    try:
        found = default_compute_score(
            answer.data_source, answer.completion_text, answer.ground_truth, dict(answer.extra_info)
        )
    except NotImplementedError as error:
        raise InputError(
            f"data_source {answer.data_source!r}: verl has no rule for it; name a custom reward"
        ) from error
    except ImportError as error:
        raise InputError(
            f"data_source {answer.data_source!r}: verl's rule needs the package {error.name}; install it, or name a "
            "custom reward"
        ) from error
    return float(found["score"] if isinstance(found, dict) else found)
