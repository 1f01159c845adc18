"""Rows in verl's schema from raw examples of code data sets. Pure functions; `rows.py` lists them.

The ground truth is JSON text that `tasks/code/formats.py` reads: PRIME's form for programs and functions, the data
set's own fields for HumanEval and MBPP. `extra_info.reference` is a solution that came with the problem, or empty.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from rayapp.core.errors import InputError
from rayapp.tasks.code.formats import prime_form, read_tests

Row = dict[str, Any]
PROGRAM_INSTRUCTION = (
    "Write a Python program that reads from standard input and writes to standard output. "
    "Put it in one ```python block."
)
FUNCTION_INSTRUCTION = "Write the Python function `{name}`. Put your code in one ```python block."
MAX_TEST_CHARS = 1 << 20
"""Of a problem's inputs and outputs: tests past it are left out. Training holds tens of thousands of rows."""
_PYTHON3 = 3
"""CodeContests' number of the language."""


def humaneval_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """The benchmark's own prompt, and nothing else.

    Raises:
        InputError: a field is missing, or it is no problem.
    """
    fields = {name: text_of(example, name) for name in ("prompt", "entry_point", "test")}
    reference = fields["prompt"] + str(example.get("canonical_solution") or "")
    return _row(fields["prompt"], fields, reference, index, split, data_source)


def mbpp_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """The prompt of MBPP's authors, which shows the tests. Both forms on the hub: full and sanitized.

    Raises:
        InputError: as for `humaneval_row`.
    """
    told = text_of(example, "text" if "text" in example else "prompt")
    tests = example.get("test_list")
    if not isinstance(tests, list) or not all(isinstance(test, str) for test in tests):
        raise InputError(f"column 'test_list' must be a list of asserts, not {tests!r:.80}")
    setup = [example.get("test_setup_code") or "", *(example.get("test_imports") or ())]
    fields = {"test_list": tests, "test_setup_code": "\n".join(setup)}
    return _row(mbpp_prompt(told, tests), fields, str(example.get("code") or ""), index, split, data_source)


def mbpp_prompt(told: str, tests: list[str]) -> str:
    """The prompt of MBPP's authors."""
    return (
        f"You are an expert Python programmer, and here is your task: {told} Your code should pass these tests:\n\n"
        + "\n".join(tests)
        + "\n"
    )


def apps_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """APPS and TACO.

    Raises:
        InputError: as for `humaneval_row`.
    """
    solutions = json.loads(example.get("solutions") or "[]")
    starter = str(example.get("starter_code") or "")
    return _competition_row(example, "question", starter, _first_parsing(solutions), index, split, data_source)


def codecontests_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Raises InputError as `humaneval_row`."""
    found = example.get("solutions") or {}
    pairs = zip(found.get("language", ()), found.get("solution", ()), strict=False) if isinstance(found, dict) else ()
    reference = _first_parsing([text for language, text in pairs if language == _PYTHON3])
    return _competition_row(example, "description", "", reference, index, split, data_source)


def livecodebench_row(example: Mapping[str, Any], index: int, split: str, data_source: str) -> Row:
    """Raises InputError as `humaneval_row`."""
    starter = str(example.get("starter_code") or "")
    return _competition_row(example, "question_content", starter, "", index, split, data_source)


def _competition_row(
    example: Mapping[str, Any], column: str, starter: str, reference: str, index: int, split: str, data_source: str
) -> Row:
    fields = _within_bounds(prime_form(example))
    name = fields.get("fn_name")
    parts = [text_of(example, column)]
    if starter.strip():
        parts.append(f"Begin with this code:\n```python\n{starter.rstrip()}\n```")
    parts.append(FUNCTION_INSTRUCTION.format(name=name) if name else PROGRAM_INSTRUCTION)
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
    """As many of the first tests as fit, at least one."""
    num_chars = 0
    for number, (given, wanted) in enumerate(zip(fields["inputs"], fields["outputs"], strict=False)):
        num_chars += len(str(given)) + len(str(wanted))
        if number and num_chars > MAX_TEST_CHARS:
            return fields | {"inputs": fields["inputs"][:number], "outputs": fields["outputs"][:number]}
    return fields


def _first_parsing(solutions: object) -> str:
    """The first solution that Python 3 can read: some sets mix it with Python 2."""
    for text in solutions if isinstance(solutions, list) else ():
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, TypeError):
            continue
        return str(text)
    return ""


def text_of(example: Mapping[str, Any], column: str) -> str:
    """A column that must hold text.

    Raises:
        InputError: it is missing, no text, or empty.
    """
    if column not in example:
        raise InputError(f"no column {column!r}; there are {', '.join(sorted(example))}")
    value = example[column]
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"column {column!r} must be a text that isn't empty, not {value!r:.80}")
    return value
