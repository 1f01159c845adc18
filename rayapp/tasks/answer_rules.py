"""Maps data sources to verl's scoring rules, and calls a rule in the text process (`text_process.py`).

Only rules that do nothing but compare strings are used; their source was checked in verl 0.9.1, and a test fails if a
new version adds or changes one. `prime_code` is replaced by runs in sandboxes; `prime_math` and `geo3k`, which evaluate
the completion, are refused. Rule files are loaded by path: importing verl takes seconds.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rayapp.core.errors import InputError
from rayapp.core.names import module_of
from rayapp.tasks.code.hidden_cases import Comparison

GSM8K = "openai/gsm8k"
# Form of a ground_truth. text: a string or a whole number; targets: a struct whose `target` is a string or a list of
# strings; tests: a code problem (`code/formats.py`).
TruthKind = Literal["any", "text", "targets", "tests"]
_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_ENDS_MARKED = re.compile(r"#### -?[0-9][0-9.,]*\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRule:
    module: str
    form: str  # of an answer, with {} in place of the answer itself, e.g. `#### {}`
    truth: TruthKind = "text"
    wrong_score: float = 0.0  # also of a completion that takes too long to read

    def is_asked_for(self, prompt: str) -> bool:
        """True if a prompt contains the text that marks the answer, such as `####`."""
        return self.form.partition("{}")[0].strip() in prompt

    def right_answer(self, ground_truth: object) -> str:
        """Return the ground truth (the first of several) as the rule accepts it in a completion."""
        found = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
        first = next(iter(found), "") if isinstance(found, Sequence) and not isinstance(found, str) else found
        return self.form.replace("{}", str(first))


_MATH = AnswerRule(module="math_reward", form=r"\boxed{{}}")
_DAPO = AnswerRule(module="math_dapo", form="Answer: {}", wrong_score=-1.0)
_SEARCH = AnswerRule(module="search_r1_like_qa_em", form="<answer>{}</answer>", truth="targets")
_RULES: Mapping[str, AnswerRule] = {
    GSM8K: AnswerRule(module="gsm8k", form="#### {}"),
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
# -> how a program's output is compared; the first four names are verl's
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
NAMES = (*_RULES, "aime…", *CODE_SOURCES)  # as error messages list them


def find_rule(data_source: str) -> AnswerRule | None:
    """Return the rule of a data source; None without one, or with one that rayapp refuses."""
    return _DAPO if data_source.startswith("aime") else _RULES.get(data_source)


def has_rule(data_source: str) -> bool:
    """True if a rule scores answers of this data source, or hidden tests do. InputError: the name looks misspelled."""
    known = (*_RULES, *CODE_SOURCES)
    if data_source in known or find_rule(data_source) is not None:
        return True
    short = {name.rpartition("/")[2].lower(): name for name in known}
    if near := difflib.get_close_matches(data_source.rpartition("/")[2].lower(), short, n=1, cutoff=0.85):
        raise InputError(
            f"data source {data_source!r} has no rule; did you mean {short[near[0]]}? To use your own reward function, "
            "leave --data-source out"
        )
    return False


def score_by_rule(
    completion_text: str, ground_truth: object, rule_file: str, options: Mapping[str, Any]
) -> dict[str, float]:
    """Return the terms `score`, `solved` and `format` of a completion: `solved` is 1 if the score is at least 1."""
    score = _number(_load(rule_file)(completion_text, ground_truth, **options))
    return {"score": score, "solved": float(score >= 1.0), "format": format_term(completion_text)}


def format_term(completion_text: str) -> float:
    return float(len(_MARKED.findall(completion_text)) == 1 and bool(_ENDS_MARKED.search(completion_text)))


def _number(found: Any) -> float:
    return float(found["score"] if isinstance(found, dict) else found)


@functools.cache
def _load(rule_file: str) -> Callable[..., Any]:
    compute_score: Callable[..., Any] = module_of(rule_file, "verl_rule").compute_score
    return compute_score
