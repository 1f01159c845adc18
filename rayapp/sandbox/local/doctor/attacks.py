"""Programs that try to get out, as data: tried on this node by the doctor, and by the adversarial tests.

    battery/*.yaml (a file per family) -> Attack -> PRELUDE and source, called as attack(canary) -> what it reached

A program reports by returning: an empty list means that everything was refused. That could also mean that the program
is broken, so the tests run each without isolation too, where it must reach something (`unisolated: must-reach`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

FOLDER = Path(__file__).with_name("battery")
LEVELS = ("ns+proc", "ns", "ll")

PRELUDE = '''
import ctypes, errno, os, signal, socket, struct, sys, time

_libc = ctypes.CDLL(None, use_errno=True)
reached = []

def attempt(what, action):
    """Run it, and note what worked. A refusal is what we hope for; any other error is a broken program."""
    try:
        action()
    except (OSError, IndexError):
        return
    reached.append(what)

def text_of(path):
    """Of a file that may be out of reach."""
    try:
        return open(path, "rb").read().decode(errors="replace")
    except OSError:
        return ""

def names_in(path):
    try:
        return os.listdir(path)
    except OSError:
        return []

def fail():
    raise PermissionError

def call(name, *args):
    """A function of libc."""
    result = getattr(_libc, name)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def syscall(name, *args):
    """A system call by its name. One that this architecture lacks counts as refused."""
    if name not in NUMBERS:
        raise PermissionError(name)
    result = _libc.syscall(ctypes.c_long(NUMBERS[name]), *args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def attack(given):
    global canary, NUMBERS
    canary, NUMBERS = given, given["numbers"]
    exec(compile(PROGRAM, "<attack>", "exec"), globals())
    return [str(what)[:200] for what in reached[:20]]
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How an attack must end if the sandbox holds. All given fields must hold; by default it returns an empty list."""

    stopped: tuple[str, ...] = ()
    """We must have ended it, for one of these causes."""
    ended: bool = False
    """It may end itself or be ended in any way, as long as it returns nothing."""
    any_end: bool = False
    """It may return anything: only the state afterwards counts."""
    within_s: float | None = None
    """Most seconds by the clock; None allows what code with this time limit may take on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One program that tries to get out."""

    family: str
    name: str
    code: str
    because: str = ""
    """Why it is tried, or why a level is left out."""
    levels: tuple[str, ...] = LEVELS
    """Levels that have to hold against it, and those with a loopback as those without, unless it names one."""
    unisolated: Literal["must-reach", "may-fail", "never"] = "must-reach"
    """Without isolation, as an ordinary user: it reaches something; it may need more than that; it must not be run."""
    needs: tuple[str, ...] = ()
    """Parts of the canary beyond those that are always there."""
    also_held: tuple[str, ...] = ()
    """Exceptions that also mean refused."""
    timeout_s: float = 3.0
    expect: Expected = field(default_factory=Expected)

    def is_for(self, level: str) -> bool:
        """Whether this level has to hold against it."""
        return level in self.levels or level.removesuffix("+lo") in self.levels

    @property
    def source(self) -> str:
        return f"PROGRAM = {self.code!r}\n{PRELUDE}"


@functools.cache
def load_attacks() -> tuple[Attack, ...]:
    """Every program, family by family.

    Raises:
        ValueError: a file is no list of programs; it is part of this package, so this is a bug.
    """
    found: list[Attack] = []
    for path in sorted(FOLDER.glob("*.yaml")):
        found += [_attack(path.stem, entry) for entry in yaml.safe_load(path.read_text())]
    names = [attack.name for attack in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two attacks have the same name: {sorted({name for name in names if names.count(name) > 1})}")
    return tuple(found)


def _attack(family: str, entry: dict[str, object]) -> Attack:
    fields = _fields(entry)
    expect = fields.pop("expect", {})
    assert isinstance(expect, dict)
    return Attack(family=family, expect=Expected(**_fields(expect)), **fields)


def _fields(entry: dict[str, object]) -> dict[str, Any]:
    """The YAML entry as arguments of the dataclass."""
    return {key.replace("-", "_"): tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
