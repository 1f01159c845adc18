"""Scores a completion for a row of data: verl's rule for its data source, and terms of form, tools and users.

    completion, row -> {correct, format, tool, custom terms} -> Reward(value = weighted sum, terms = all of them)

Called by the agent loop after the last turn. Rules read the completion in the text process, and code in it runs in a
sandbox (`code/scoring.py`). Never raises for what the
completion says or what a custom function does.
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rayapp.config.agent import CodeSection
from rayapp.core.errors import InputError
from rayapp.core.protocols import SandboxSource
from rayapp.core.types import Reward
from rayapp.tasks.answer_rules import (
    CODE_SOURCES,
    GSM8K,
    NAMES,
    Rule,
    TruthKind,
    find_rule,
    format_term,
    score_by_rule,
)
from rayapp.tasks.code.formats import as_json
from rayapp.tasks.code.scoring import CodeProblem
from rayapp.tasks.custom_rewards import CustomReward, RewardFailedError, is_storable
from rayapp.tasks.text_process import TextReadingFailedError, TextTooCostlyError, on_text

Method = Literal["strict", "flexible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRewards:
    """How much each term of the reward counts. Every term is recorded, also those of weight 0."""

    method: Method = "strict"
    """verl's: `strict` wants `#### N`, `flexible` takes the last number. Both look at the last 300 characters."""
    format_score: float = 0.0
    """Score of a wrong answer that could be read (verl's name)."""
    correct_score: float = 1.0
    format_weight: float = 0.0
    """Weight of the term `format`: 1 where the completion has one `#### N`, at its very end."""
    tool_weight: float = 0.0
    """Weight of the term `tool`: the sum of the rewards that the tools gave on the way."""
    tool_verdict_weight: float = 0.0
    """Weight of the term `tool_verdict`: the sum of their verdicts on the whole trajectory."""
    custom: CustomReward | None = None
    """The user's function, in place of the data source's rule."""
    code: CodeSection = field(default_factory=CodeSection)
    """How code problems are tested."""
    is_optional: bool = False
    """Judges alone count: a data source without a rule has no verdict, and needs none."""

    def code_problem(self, data_source: str, ground_truth: object) -> CodeProblem | None:
        """The row as a code problem; None where it is none, or a custom function scores it."""
        is_code = data_source in CODE_SOURCES or data_source in self.code.sources
        if self.custom is not None or not is_code:
            return None
        comparison = CODE_SOURCES.get(data_source, "lines")
        return CodeProblem(ground_truth=as_json(ground_truth), comparison=comparison, rules=self.code)

    def truth_kind(self, data_source: str) -> TruthKind:
        """The form that the ground_truth of a data source's rows must have.

        Raises:
            InputError: there is no rule for it, and no custom function.
        """
        if self.custom is not None:
            return "any"
        if self.has_no_verdict(data_source):
            return "any"
        return "tests" if self.code_problem(data_source, "") else _rule(data_source).truth

    def has_no_verdict(self, data_source: str) -> bool:
        """Whether only judges say what its answers are worth."""
        has_rule = bool(self.custom or self.code_problem(data_source, "") or find_rule(data_source))
        return self.is_optional and not has_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion with what its row says."""

    completion_text: str
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]
    tool_reward: float = 0.0
    tool_verdict: float = 0.0


async def score_answer(answer: Answer, rewards: AnswerRewards, sandboxes: SandboxSource, *, seed: int = 0) -> Reward:
    """The verdict. `terms["solved"]` and `terms["pass_rate"]` are 1 where the answer is right.

    A text that is too long or takes too much time to read is a wrong answer, with status too_long or unreadable.

    Args:
        sandboxes: where code in the answer runs.
        seed: draws the tests of a code problem; the same for all answers that are compared.
    Raises:
        InputError: no rule for this data source, and no custom function: a mistake of the config, not of the policy.
            The check before a run (`AnswerRewards.truth_kind`) tells it first.
        SandboxConfigError: no sandbox can ever be had with this configuration.
    """
    started = time.perf_counter()
    try:
        found = await _found(answer, rewards, sandboxes, seed)
        verdict = _weighed(found, answer, rewards) if found.valid else found
    except (RewardFailedError, TextReadingFailedError) as error:
        verdict = Reward.invalid(error.kind, str(error))
    return replace(verdict, time_score_s=time.perf_counter() - started)


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
        form = await on_text(format_term, answer.completion_text)
    except TextTooCostlyError:
        form = 0.0
    return Reward(value=terms["score"], terms={"pass_rate": solved, **terms, "solved": solved, "format": form})


async def _by_rule(answer: Answer, rewards: AnswerRewards) -> Reward:
    rule = _rule(answer.data_source)
    truth = str(answer.ground_truth) if rule.truth == "text" else answer.ground_truth
    plain, options = _options(answer.data_source, rewards)
    file = str(_rule_file(rule.module))
    try:
        terms = await on_text(score_by_rule, answer.completion_text, truth, file, options, plain)
    except TextTooCostlyError as error:
        terms = {"score": rule.wrong_score, "solved": 0.0, "pass_rate": 0.0, "format": 0.0}
        return Reward(value=rule.wrong_score, terms=terms, status=error.kind, detail=str(error))
    return Reward(value=terms["score"], terms={"pass_rate": terms["solved"], **terms})


def _weighed(found: Reward, answer: Answer, rewards: AnswerRewards) -> Reward:
    terms = found.terms | {"tool": answer.tool_reward, "tool_verdict": answer.tool_verdict}
    value = found.value + rewards.format_weight * terms["format"]
    value += rewards.tool_weight * answer.tool_reward + rewards.tool_verdict_weight * answer.tool_verdict
    if not is_storable(value):
        raise RewardFailedError(f"the reward is {value!r}, with these terms: {terms}", "reward_nonsense")
    return replace(found, value=value, terms=terms)


def _options(data_source: str, rewards: AnswerRewards) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the section `reward` that the rule takes: first for `solved`, then for `score`."""
    if data_source != GSM8K:
        return {}, {}
    plain = {"method": rewards.method}
    return plain, plain | {"format_score": rewards.format_score, "score": rewards.correct_score}


def _rule(data_source: str) -> Rule:
    rule = find_rule(data_source)
    if rule is None:
        raise InputError(
            f"data_source {data_source!r} has no rule here: only tests in sandboxes and rules of verl's that compare "
            f"text are used ({', '.join(NAMES)}), none that runs or evaluates what the policy wrote in the trainer. "
            "Name it in reward.code.sources if its rows are code problems (docs/datasets.md), or a function of your "
            "own in reward.custom (docs/data.md)."
        )
    return rule


@functools.cache
def _rule_file(module: str) -> Path:
    # Find verl without importing it, which takes seconds.
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("verl is not installed, and its rules score these data sources: make venv")
    return Path(spec.submodule_search_locations[0]) / "utils" / "reward_score" / f"{module}.py"
