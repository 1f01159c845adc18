"""Scores an answer to a data row: by verl's rule for the data source, hidden tests, or the user's reward function.

    completion, row -> {score, format, custom terms} -> Reward; `verdict.py` adds the terms of tools and judges

Rules read the completion in the text process; code in a completion runs in a sandbox (`code/scoring.py`).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rayapp.config.agent import CodeSection
from rayapp.core.errors import InputError
from rayapp.core.protocols import SandboxSource
from rayapp.core.syntax import answer_of
from rayapp.core.types import Reward
from rayapp.tasks.answer_rules import (
    CODE_SOURCES,
    GSM8K,
    NAMES,
    AnswerRule,
    TruthKind,
    find_rule,
    format_term,
    score_by_rule,
)
from rayapp.tasks.code.formats import as_json
from rayapp.tasks.code.scoring import CodeProblem
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.text_process import TextTooCostlyError, on_text
from rayapp.tasks.verdict import PLAIN, Scorer, ToolRewards, Weights, verdict

Method = Literal["strict", "flexible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRewards:
    """Settings for scoring data rows. Every term is recorded, even with weight 0."""

    # Method of verl for GSM8K: of the last 300 characters, `strict` needs `#### N`, `flexible` takes the last number.
    method: Method = "strict"
    weights: Weights = PLAIN
    custom: CustomReward | None = None  # replaces the data source's rule
    code: CodeSection = field(default_factory=CodeSection)
    reads_thoughts: bool = False  # verl's rules read the thoughts too, as in verl
    is_optional: bool = False  # data sources without a rule are accepted, because judges score their answers

    def code_problem(self, data_source: str, ground_truth: object) -> CodeProblem | None:
        """Return the row as a code problem; None if it isn't one, or if a custom function scores it."""
        is_code = data_source in CODE_SOURCES or data_source in self.code.sources
        if self.custom is not None or not is_code:
            return None
        comparison = CODE_SOURCES.get(data_source, "lines")
        return CodeProblem(ground_truth=as_json(ground_truth), comparison=comparison, rules=self.code)

    def truth_kind(self, data_source: str) -> TruthKind:
        """Return the form that a data source's ground_truth must have. InputError: nothing scores this data source."""
        if self.custom is not None:
            return "any"
        if self.has_no_verdict(data_source):
            return "any"
        return "tests" if self.code_problem(data_source, "") else _rule(data_source).truth

    def has_no_verdict(self, data_source: str) -> bool:
        """True if only judges score the answers of this data source."""
        has_rule = bool(self.custom or self.code_problem(data_source, "") or find_rule(data_source))
        return self.is_optional and not has_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion with the fields of its data row."""

    completion_text: str
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]

    @classmethod
    def of(cls, row: DataRow, completion_text: str) -> Answer:
        return cls(
            completion_text=completion_text,
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )


async def score_answer(
    answer: Answer,
    rewards: AnswerRewards,
    sandboxes: SandboxSource,
    *,
    seed: int = 0,
    tools: ToolRewards | None = None,
) -> Reward:
    """Return the reward of an answer. `terms["solved"]` and `terms["pass_rate"]` are 1 if the answer is right.

    `seed` draws the tests of a code problem: answers that are compared need the same one. Raises one of `ENDS_GROUP`.
    """
    score = scorer_of(answer, rewards, sandboxes, seed=seed)
    return await verdict(score, weights=rewards.weights, tools=tools or ToolRewards())


def scorer_of(answer: Answer, rewards: AnswerRewards, sandboxes: SandboxSource, *, seed: int) -> Scorer:
    """Return a function that scores the answer; one that is too long or takes too long to read is wrong. UserError:
    nothing scores this data source, or the reward function can't be loaded."""
    rewards.truth_kind(answer.data_source)
    if rewards.custom is not None:
        rewards.custom.load()
    return partial(_found, answer, rewards, sandboxes, seed)


async def _found(answer: Answer, rewards: AnswerRewards, sandboxes: SandboxSource, seed: int) -> Reward:
    if rewards.custom is not None:
        return await _by_custom(answer, rewards.custom)
    problem = rewards.code_problem(answer.data_source, answer.ground_truth)
    if rewards.has_no_verdict(answer.data_source):
        return Reward(value=0.0, terms={"format": 0.0})
    if problem is not None:
        return await problem.score(answer.completion_text, sandboxes, seed=seed)
    return await _by_rule(answer, rewards)


async def _by_custom(answer: Answer, custom: CustomReward) -> Reward:
    terms = await custom(
        data_source=answer.data_source,
        solution_str=answer.completion_text,
        ground_truth=answer.ground_truth,
        extra_info=answer.extra_info,
    )
    solved = float(terms.get("solved", terms["score"] >= 1.0))
    try:
        form = await on_text(format_term, answer_of(answer.completion_text))
    except TextTooCostlyError:
        form = 0.0
    return Reward(value=terms["score"], terms={"pass_rate": solved, **terms, "solved": solved, "format": form})


async def _by_rule(answer: Answer, rewards: AnswerRewards) -> Reward:
    rule = _rule(answer.data_source)
    truth = str(answer.ground_truth) if rule.truth == "text" else answer.ground_truth
    options = {"method": rewards.method} if answer.data_source == GSM8K else {}
    file = str(_rule_file(rule.module))
    try:
        text = answer.completion_text if rewards.reads_thoughts else answer_of(answer.completion_text)
        terms = await on_text(score_by_rule, text, truth, file, options)
    except TextTooCostlyError as error:
        terms = {"score": rule.wrong_score, "solved": 0.0, "pass_rate": 0.0, "format": 0.0}
        return Reward(value=rule.wrong_score, terms=terms, status=error.kind, detail=str(error))
    return Reward(value=terms["score"], terms={"pass_rate": terms["solved"], **terms})


def _rule(data_source: str) -> AnswerRule:
    rule = find_rule(data_source)
    if rule is None:
        raise InputError(
            f"data_source {data_source!r} has no scoring rule in rayapp. Data sources with a rule are "
            f"{', '.join(NAMES)}; verl's other rules are not used, because they evaluate the policy's text in the "
            "trainer. If the rows are code problems, add this data_source to reward.code.sources (docs/datasets.md); "
            "otherwise name your own reward function in reward.custom (docs/data.md)"
        )
    return rule


@functools.cache
def _rule_file(module: str) -> Path:
    # Find verl without importing it, which takes seconds.
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"verl is not installed, but its rule {module} scores this data_source. Run `make venv`, which installs "
            "verl"
        )
    return Path(spec.submodule_search_locations[0]) / "utils" / "reward_score" / f"{module}.py"
