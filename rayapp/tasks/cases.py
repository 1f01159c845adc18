"""Draws a task's hidden tests: inputs from expressions and a seed, expected outputs from the task's reference.

Expressions are part of the task, so they are trusted and run in this process. Expected values stay in it: only inputs
go to a sandbox.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType

from rayapp.core.errors import InputError
from rayapp.sandbox.verdict.compare import same_value

# Modules that expressions may use.
MODULES = ("bisect", "collections", "functools", "heapq", "itertools", "math", "re", "statistics", "string")
_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One hidden test."""

    args: tuple[object, ...]  # plain data
    expected: object  # plain data, compared outside the sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSource:
    """The expressions from which a task's hidden tests are drawn.

    Example: `CaseSource(task="add", tests=("(rng.randint(0, 9), 1)",), reference="a + b", parameters=("a", "b"))` gives
    for a seed one case such as `Case(args=(4, 1), expected=5)`.
    """

    task: str
    tests: tuple[str, ...]  # Expressions over `rng`, one for each test: the argument, or a tuple of several.
    reference: str  # expression over the parameters' names and `args`, the tuple of all arguments
    parameters: tuple[str, ...]
    helpers: str = ""  # Python source whose functions the expressions may call

    def draw(self, seed: int) -> tuple[Case, ...]:
        """Return the tests that a seed draws, always the same."""
        return _draw(self, seed)

    def check(self, case: Case, test: str) -> None:
        """Raise InputError unless the reference returns the output that the task's author wrote for a case."""
        _check_plain((*case.args, case.expected), f"task {self.task}: {test}, holds a value")
        found = _referred(self, case.args, _names(self), test)
        if not same_value(found, case.expected):
            raise InputError(f"task {self.task}: the reference fails {test}: it gives {_short(repr(found))}")


@functools.lru_cache(maxsize=256)
def _draw(source: CaseSource, seed: int) -> tuple[Case, ...]:
    # Cache the tests: all trajectories of a group share the seed, and the reference may be slow.
    names = _names(source)
    # The task's name is part of the seed: otherwise two tasks with the same expression would share their inputs.
    names["rng"] = random.Random(f"{source.task}/{seed}")
    return tuple(_case(source, number, names) for number in range(len(source.tests)))


def _names(source: CaseSource) -> dict[str, object]:
    names: dict[str, object] = {module: __import__(module) for module in MODULES}
    if source.helpers:
        try:
            exec(compile(source.helpers, f"<helpers of task {source.task}>", "exec"), names)
        except Exception as error:  # boundary: the task author's code may raise anything
            raise InputError(f"task {source.task}: its helpers can't run: {_reason(error)}") from error
    return names


def _case(source: CaseSource, number: int, names: dict[str, object]) -> Case:
    where = f"task {source.task}: test {number + 1}, {_short(source.tests[number])}"
    value = _evaluate(source.tests[number], names, where)
    args = _as_args(value, source.parameters, where)
    _check_plain(args, f"{where}, gives an input")
    return Case(args=args, expected=_referred(source, args, names, f"test {number + 1}"))


def _referred(source: CaseSource, args: tuple[object, ...], names: dict[str, object], test: str) -> object:
    where = f"task {source.task}: the reference, {_short(source.reference)}, on {test}"
    # Copy the arguments: a reference that works in place would change the input that the sandbox gets.
    own = copy.deepcopy(args)
    scope = {**names, **dict(zip(source.parameters, own, strict=True)), "args": own}
    expected = _evaluate(source.reference, scope, where)
    _check_plain(expected, f"{where}, gives a value")
    return expected


def _as_args(value: object, parameters: Sequence[str], where: str) -> tuple[object, ...]:
    if len(parameters) == 1:
        return (value,)
    if not isinstance(value, tuple) or len(value) != len(parameters):
        raise InputError(
            f"{where}, gives {_short(repr(value))}, but the function takes {len(parameters)} arguments "
            f"({', '.join(parameters)}): write the test as a tuple of {len(parameters)} values"
        )
    return value


def _evaluate(expression: str, names: dict[str, object], where: str) -> object:
    try:
        return eval(_compiled(expression), names)
    except Exception as error:  # boundary: the task author's expression may raise anything
        raise InputError(f"{where}, raises {_reason(error)}") from error


@functools.lru_cache(maxsize=1024)
def _compiled(expression: str) -> CodeType:
    return compile(expression.strip(), "<task expression>", "eval")


def _check_plain(value: object, where: str) -> None:
    kind = type(value)
    if kind in _PLAIN:
        return
    if kind is dict:
        assert isinstance(value, dict)
        parts: list[object] = [*value.keys(), *value.values()]
    elif kind in (list, tuple, set):
        assert isinstance(value, list | tuple | set)
        parts = list(value)
    else:
        raise InputError(
            f"{where} of type {kind.__name__}; only plain data can be compared: None, bool, int, float, str, bytes, "
            "and lists, tuples, sets and dicts of them"
        )
    for part in parts:
        _check_plain(part, where)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _short(text: str, limit: int = 120) -> str:
    text = " ".join(text.split())
    return f"`{text}`" if len(text) <= limit else f"`{text[:limit]}…`"
