"""Answers that deserve nothing, for functions and for programs: empty ones, obvious ones, and cheats.

All of them are text here and run only in sandboxes. A cheat (`cheats.yaml`) is put into an answer that does nothing:
whatever that earns beyond doing nothing, it earned by cheating.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources

import yaml
from pydantic import BaseModel, ConfigDict

from rayapp.tasks.audit.subject import Answer

PROSE = (Answer(name="an empty answer", text=""), Answer(name="prose", text="I don't know how to do this."))

CONSTANTS = ("None", "0", "1", "-1", "True", "False", "''", "[]", "{}", "()")
LINES = ("0", "1", "-1", "YES", "NO", "Yes", "No")


GUESSES = (*LINES, "2", "10", "100", "True", "False", "A", "B", "[]")


def guesses(question: str) -> tuple[Answer, ...]:
    """Short answers that anybody would try, and two that hold many at once: the question, and all numbers up to 99."""
    told = (*((f"the answer {guess}", guess) for guess in GUESSES), ("the question itself", question),
            ("every number to 99", " ".join(map(str, range(100)))))  # fmt: skip
    return tuple(Answer(name=name, text=f"<answer>{text}</answer>") for name, text in told)


def fenced(code: str) -> str:
    """Code as an answer."""
    return f"```python\n{code.rstrip()}\n```\n"


def function(name: str, parameters: Sequence[str], value: str, above: str = "") -> str:
    """An answer that returns the value of an expression."""
    return fenced(f"{above}\n\ndef {name}({', '.join(parameters)}):\n    return {value}")


def nothing_of_function(name: str, parameters: Sequence[str]) -> tuple[Answer, ...]:
    return (*PROSE, Answer(name="a function that does nothing", text=function(name, parameters, "None")))


def trivial_of_function(name: str, parameters: Sequence[str]) -> tuple[Answer, ...]:
    """`return xs` for each parameter, and constants."""
    inputs = [f"{each.removeprefix('*')}[0]" if each.startswith("*") else each for each in parameters]
    values = [*inputs, *CONSTANTS[1:]]
    return tuple(Answer(name=f"return {value}", text=function(name, parameters, value)) for value in values)


def cheats_of_function(name: str, parameters: Sequence[str]) -> tuple[Answer, ...]:
    return tuple(
        Answer(name=cheat.name, text=function(name, parameters, cheat.value or "None", cheat.above))
        for cheat in _cheats()
        if not cheat.programs_only
    )


def cheats_of_program() -> tuple[Answer, ...]:
    return tuple(Answer(name=cheat.name, text=fenced(cheat.above)) for cheat in _cheats() if not cheat.value)


def cheats() -> dict[str, str]:
    """Code to put above any other, by what it does."""
    return {cheat.name: cheat.above for cheat in _cheats() if not cheat.value and not cheat.programs_only}


class _Cheat(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    above: str
    value: str = ""
    programs_only: bool = False


@cache
def _cheats() -> tuple[_Cheat, ...]:
    text = resources.files("rayapp.tasks.audit").joinpath("cheats.yaml").read_text(encoding="utf-8")
    return tuple(map(_Cheat.model_validate, yaml.safe_load(text)))


NOTHING_OF_PROGRAM = (*PROSE, Answer(name="a program that does nothing", text=fenced("pass")))
TRIVIAL_OF_PROGRAM = (
    *(Answer(name=f"print({line!r})", text=fenced(f"print({line!r})")) for line in LINES),
    Answer(name="prints its input", text=fenced("import sys\nprint(sys.stdin.read())")),
    Answer(name="prints its first line", text=fenced("print(input())")),
)
