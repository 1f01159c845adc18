"""verl's rules: which one scores which data source, and the call of one. The call is made in the text process.

Only rules that are pure work on strings are here: a text of the policy's can't do anything but be compared. Each was
read in verl 0.9.1; they import re, random and string, and know no eval, exec, file or process. In place of
`prime_code`, which runs the completion, is our own rule, which does so in sandboxes (`code/scoring.py`). What else its
`default_compute_score` knows is refused before a run starts: `prime_math` (sympy, and eval for `\\pi` and matrices) and
`geo3k` (mathruler, which uses sympy) evaluate the completion. A test goes through verl's dispatcher and these files, so
that a verl that adds or changes a rule is noticed.

The files are loaded by path: importing verl itself takes seconds, with torch and Ray.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayapp.core.imports import module_of
from rayapp.tasks.code.outputs import Comparison

GSM8K = "openai/gsm8k"
TruthKind = Literal["any", "text", "targets", "tests"]
"""Form of a row's ground_truth. any: not null; text: that or a whole number; targets: a struct whose `target`
is text, or texts; tests: a code problem (`code/formats.py`)."""
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_ENDS_MARKED = re.compile(r"#### -?[0-9][0-9.,]*\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: a module of `verl.utils.reward_score`."""

    module: str
    truth: TruthKind = "text"
    wrong_score: float = 0.0
    """Score of a wrong answer, and of a text that can't be read."""


_MATH = Rule(module="math_reward")
_DAPO = Rule(module="math_dapo", wrong_score=-1.0)
_SEARCH = Rule(module="search_r1_like_qa_em", truth="targets")
_RULES: Mapping[str, Rule] = {
    GSM8K: Rule(module="gsm8k"),
    "lighteval/MATH": _MATH,
    "DigitalLearningGmbH/MATH-lighteval": _MATH,
    "HuggingFaceH4/MATH-500": _MATH,
    "math_dapo": _DAPO,
    "math": _DAPO,
    "math_dapo_reasoning": _DAPO,
    "searchR1_nq": _SEARCH,
    "searchR1_triviaqa": _SEARCH,
    "searchR1_popqa": _SEARCH,
    "searchR1_hotpotqa": _SEARCH,
    "searchR1_2wikimultihopqa": _SEARCH,
    "searchR1_musique": _SEARCH,
    "searchR1_bamboogle": _SEARCH,
}
CODE_SOURCES: Mapping[str, Comparison] = {
    "apps": "lines",
    "codecontests": "lines",
    "codeforces": "lines",
    "taco": "lines",
    "codeparrot/apps": "lines",
    "BAAI/TACO": "lines",
    "deepmind/code_contests": "lines",
    "livecodebench/code_generation_lite": "decimals",
    "openai/openai_humaneval": "lines",
    "google-research-datasets/mbpp": "lines",
}
"""Data sources whose rows are code problems, and how a program's output is compared. The first four are verl's."""
NAMES = (*_RULES, "aime…", *CODE_SOURCES)
"""Data sources that have a rule, for messages."""


def find_rule(data_source: str) -> Rule | None:
    """The rule of a data source; None where there is none that may be used here."""
    return _DAPO if data_source.startswith("aime") else _RULES.get(data_source)


def score_by_rule(
    completion_text: str, ground_truth: object, rule_file: str, options: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, float]:
    """`score`, `solved` and `format` of a completion.

    Args:
        rule_file: path of verl's module.
        options: further arguments of its compute_score, for `score`.
        plain: those of them that also count for `solved`, which is 1 where the score is at least 1.
    """
    rule = _load(rule_file)
    score = _number(rule(completion_text, ground_truth, **options))
    solved = score if options == plain else _number(rule(completion_text, ground_truth, **plain))
    return {"score": score, "solved": float(solved >= 1.0), "format": format_term(completion_text)}


def format_term(completion_text: str) -> float:
    """1.0 if the text has exactly one `#### N` and ends with it, else 0.0."""
    return float(len(_MARKED.findall(completion_text)) == 1 and bool(_ENDS_MARKED.search(completion_text)))


def _number(found: Any) -> float:
    return float(found["score"] if isinstance(found, dict) else found)


@functools.cache
def _load(rule_file: str) -> Callable[..., Any]:
    compute_score: Callable[..., Any] = module_of(rule_file, "verl_rule").compute_score
    return compute_score
