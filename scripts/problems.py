"""Makes rayapp's own small set of word problems, in GSM8K's form, for tests and for runs without a network.

    python -m scripts.problems      writes rayapp/tasks/data/library/*.jsonl, always the same bytes

Each problem is a template with numbers. Its worked answer marks every step `<<3*4=12>>` and ends with `#### N`, as
answers of GSM8K do. `check_problem` verifies an answer in two ways, neither of which uses the code that writes the
steps.
"""

from __future__ import annotations

import ast
import json
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from rayapp.core import syntax
from rayapp.core.errors import InputError

FOLDER = Path(__file__).parents[1] / "rayapp" / "tasks" / "data" / "library"
SPLITS = {"train": 8, "test": 2}
"""Split -> number of problems per template. 30 templates make 240 and 60 problems."""
_SEED = 20
_NAMES = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fatou", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena")
_STEP = re.compile(r"<<([^=<>]+)=(-?\d+)>>(-?\d+)")
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One kind of problem. The head of problem_templates.yaml explains the fields."""

    name: str
    question: str
    numbers: dict[str, list[int]]
    steps: list[str]
    formula: str
    derived: dict[str, str] = field(default_factory=dict)


@cache
def load_templates() -> tuple[Template, ...]:
    import yaml

    text = Path(__file__).with_name("problem_templates.yaml").read_text()
    return tuple(Template(**entry) for entry in yaml.safe_load(text))


def generate(split: str) -> list[dict[str, Any]]:
    """Return the problems of one split. No question is in both splits.

    Returns:
        One object for each problem: `{"question": …, "answer": "… #### 12", "template": "apples", "numbers": {"a": 5,
        "b": 7}}`.
    """
    first = 0 if split == "train" else SPLITS["train"]
    problems = [list(_draw_all(template))[first : first + SPLITS[split]] for template in load_templates()]
    # Take the kinds of problems in turn, so that the first rows of a split have every kind.
    return [problems[kind][row] for row in range(SPLITS[split]) for kind in range(len(problems))]


def check_problem(problem: Mapping[str, Any]) -> None:
    """Verify one answer: every marked step by exact arithmetic, and the last step also by the template's formula."""
    template = next(template for template in load_templates() if template.name == problem["template"])
    numbers = {name: Fraction(value) for name, value in problem["numbers"].items()}
    steps = _STEP.findall(problem["answer"])
    final = int(problem["answer"].rpartition("#### ")[2])
    wrong = [step for step in steps if not evaluate(step[0], {}) == int(step[1]) == int(step[2])]
    if wrong or len(steps) != len(template.steps):
        raise InputError(f"{problem['question']!r}: wrong steps {wrong}, or {len(steps)} of {len(template.steps)}")
    if not evaluate(template.formula, numbers) == final == int(steps[-1][1]):
        raise InputError(f"{problem['question']!r}: {final} is not {template.formula} with {problem['numbers']}")
    shown = set(re.findall(r"\{(\w+)\}", template.question)) - {"who"}
    if not {str(numbers[name]) for name in shown} <= set(re.findall(r"-?\d+", problem["question"])):
        raise InputError(f"{problem['question']!r} does not contain all of {sorted(shown)}")


def evaluate(expression: str, numbers: Mapping[str, Fraction]) -> Fraction:

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.Constant(value=int(number)):
                return Fraction(number)
            case ast.Name(id=name) if name in numbers:
                return numbers[name]
        raise InputError(f"{expression!r} is not arithmetic")

    return value(syntax.expression(expression))


def _draw_all(template: Template) -> Iterator[dict[str, Any]]:
    """Yield different problems of one kind, without end and always in the same order."""
    draw, seen = random.Random(f"{_SEED}:{template.name}"), set[tuple[tuple[str, int], ...]]()
    while len(seen) < sum(SPLITS.values()):
        numbers = {name: draw.randint(low, high) for name, (low, high) in template.numbers.items()}
        for name, expression in template.derived.items():
            numbers[name] = _whole(evaluate(expression, _fractions(numbers)))
        if tuple(numbers.items()) not in seen:
            seen.add(tuple(numbers.items()))
            yield _write(template, numbers, draw.choice(_NAMES))


def _write(template: Template, numbers: dict[str, int], who: str) -> dict[str, Any]:
    known, lines, name = dict(numbers), [], ""
    for step in template.steps:
        sentence, expression, name = (part.strip() for part in step.split("|"))
        shown = re.sub(r"[a-z]\w*", lambda found: str(known[found.group()]), expression)
        known[name] = _whole(evaluate(expression, _fractions(known)))
        lines.append(f"{sentence.format(who=who, **numbers)} {shown} = <<{shown}={known[name]}>>{known[name]}.")
    answer = "\n".join([*lines, f"#### {known[name]}"])
    question = template.question.format(who=who, **numbers)
    return {"question": question, "answer": answer, "template": template.name, "numbers": numbers}


def _fractions(numbers: Mapping[str, int]) -> dict[str, Fraction]:
    return {name: Fraction(number) for name, number in numbers.items()}


def _whole(number: Fraction) -> int:
    if number.denominator != 1:
        raise InputError(f"{number} is not a whole number: correct the template's ranges")
    return number.numerator


def main() -> None:
    for split in SPLITS:
        lines = [json.dumps(problem) + "\n" for problem in generate(split)]
        (FOLDER / f"{split}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
