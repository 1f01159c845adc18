"""The shipped problems: every answer is verified, and the files are what the generator writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rayapp.core.errors import InputError
from scripts.problems import FOLDER, SPLITS, check_problem, evaluate, generate


def shipped(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / f"{split}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("split", SPLITS)
def test_every_shipped_answer_is_right(split: str) -> None:
    for problem in shipped(split):
        check_problem(problem)


@pytest.mark.parametrize("split", SPLITS)
def test_the_files_are_what_the_generator_writes(split: str) -> None:
    assert shipped(split) == generate(split)


def test_there_are_enough_problems_and_none_twice() -> None:
    train, test = ([problem["question"] for problem in shipped(split)] for split in ("train", "test"))

    assert (len(train), len(test)) == (240, 60)
    assert len({*train, *test}) == 300


@pytest.mark.parametrize(
    ("old", "new"),
    [("=12>>12", "=13>>13"), ("#### 12", "#### 13"), ("<<5+7=12>>12", ""), ("<<5+7=12>>12", "<<5+7=12>>13")],
)
def test_a_wrong_answer_does_not_pass(old: str, new: str) -> None:
    problem = {
        "question": "Ada has 5 apples and picks 7 more. How many apples does Ada have now?",
        "answer": "Together that is 5+7 = <<5+7=12>>12.\n#### 12",
        "template": "apples",
        "numbers": {"a": 5, "b": 7},
    }
    check_problem(problem)

    with pytest.raises(InputError):
        check_problem(problem | {"answer": problem["answer"].replace(old, new)})
    with pytest.raises(InputError):
        check_problem(problem | {"question": "Ada has apples."})


@pytest.mark.parametrize("expression", ["__import__('os')", "a", "2**3", "1.5", "[1]"])
def test_only_arithmetic_is_evaluated(expression: str) -> None:
    with pytest.raises(InputError):
        evaluate(expression, {})
