"""The subject of an audit: a task of any kind with answers to try, its scoring, and its secrets.

This module also makes answers that deserve no reward: empty ones, trivial ones and cheats. In this process they are
only strings. A cheat (`cheats.yaml`) is inserted into a no-op answer, so any reward above the no-op's is due to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict

from rayapp.core.protocols import SandboxSource, Task
from rayapp.core.types import AgentStart, Prompt, Reward
from rayapp.tasks.verdict import task_verdict

# Function of an answer, sandboxes and a seed, which draws the hidden tests.
Score = Callable[[str, SandboxSource, int], Awaitable[Reward]]


def score_of(task: Task) -> Score:
    """Return a function that scores an answer with the task's own `score`, for an empty prompt."""
    prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))

    async def score(answer: str, sandboxes: SandboxSource, seed: int) -> Reward:
        return await task_verdict(task, prompt, answer, sandboxes, seed=seed)

    return score


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Named answer that the audit scores."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One task under audit."""

    name: str
    kind: str
    prompt: str  # Policy's prompt, which is searched for leaks.
    score: Score
    solution: str | None  # Answer that must earn 1; None if the task has no solution.
    nothing: tuple[Attempt, ...]  # Answers of which none may earn more than 0.
    trivial: tuple[Attempt, ...] = ()  # Answers such as `return xs`.
    # Function that makes the solution, if it has to be made in a sandbox.
    solve: Callable[[SandboxSource], Awaitable[str | None]] | None = None
    cheats: tuple[Attempt, ...] = ()  # Answers that try to earn a reward without solving the task.
    # Function for cheats that doesn't enforce banned names: isolation alone must defeat cheats.
    score_cheat: Score | None = None
    # Function for trivial answers that gives the share of passed tests, if `score` is all or nothing.
    score_share: Score | None = None
    limit_s: float = 0.0  # Seconds for all tests together; 0 without such a limit.
    secrets: tuple[str, ...] = ()  # Texts of the solution and the hidden tests, too long to occur elsewhere by chance.
    cannot_run: str = ""  # Reason why the task can't be audited; empty if it can be.
    workspace: AgentStart | None = None  # Workspace that an agent starts with; None if no agent can play this task.
    notes: Mapping[str, str] = field(default_factory=dict)  # Check -> reason why it is restricted for this task.


PROSE = (Attempt(name="an empty answer", text=""), Attempt(name="prose", text="I don't know how to do this."))

CONSTANTS = ("None", "0", "1", "-1", "True", "False", "''", "[]", "{}", "()")
LINES = ("0", "1", "-1", "YES", "NO", "Yes", "No")


def fenced(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```\n"


def function(name: str, parameters: Sequence[str], value: str, above: str = "") -> str:
    """Return an answer whose function returns the expression `value`."""
    return fenced(f"{above}\n\ndef {name}({', '.join(parameters)}):\n    return {value}")


def nothing_of_function(name: str, parameters: Sequence[str]) -> tuple[Attempt, ...]:
    return (*PROSE, Attempt(name="a function that does nothing", text=function(name, parameters, "None")))


def trivial_of_function(name: str, parameters: Sequence[str]) -> tuple[Attempt, ...]:
    inputs = [f"{each.removeprefix('*')}[0]" if each.startswith("*") else each for each in parameters]
    values = [*inputs, *CONSTANTS[1:]]
    return tuple(Attempt(name=f"return {value}", text=function(name, parameters, value)) for value in values)


def cheats_of_function(name: str, parameters: Sequence[str]) -> tuple[Attempt, ...]:
    return tuple(
        Attempt(name=cheat.name, text=function(name, parameters, cheat.value or "None", cheat.above))
        for cheat in _cheats()
        if not cheat.programs_only
    )


def cheats_of_program() -> tuple[Attempt, ...]:
    return tuple(Attempt(name=cheat.name, text=fenced(cheat.above)) for cheat in _cheats() if not cheat.value)


def cheats() -> dict[str, str]:
    """Return description -> code of the cheats that can be put above any other code."""
    return {cheat.name: cheat.above for cheat in _cheats() if not cheat.value and not cheat.programs_only}


class _Cheat(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    above: str
    value: str = ""
    programs_only: bool = False


@cache
def _cheats() -> tuple[_Cheat, ...]:
    text = resources.files("rayapp.extras.audit").joinpath("cheats.yaml").read_text(encoding="utf-8")
    return tuple(map(_Cheat.model_validate, yaml.safe_load(text)))


NOTHING_OF_PROGRAM = (*PROSE, Attempt(name="a program that does nothing", text=fenced("pass")))
TRIVIAL_OF_PROGRAM = (
    *(Attempt(name=f"print({line!r})", text=fenced(f"print({line!r})")) for line in LINES),
    Attempt(name="prints its input", text=fenced("import sys\nprint(sys.stdin.read())")),
    Attempt(name="prints its first line", text=fenced("print(input())")),
)
