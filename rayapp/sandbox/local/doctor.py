"""Measures this node's isolation by attacking it, for `rayapp sandbox doctor` and the adversarial tests.

    battery/*.yaml (a file per family) -> Attack -> PRELUDE and source, called as attack(canary) -> things reached
    for each level: start a zygote -> for each attack: run it, judge it, run an honest program -> IsolationReport

An attack returns the things that it reached: an empty list means that everything was refused. A broken attack also
returns an empty list, so the tests run each attack without isolation too, where it must reach something (`unisolated:
must-reach`). The doctor changes nothing on the node, unless an attack breaks out of its sandbox.
"""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from rayapp.core.errors import IsolationUnavailableError, SandboxError
from rayapp.core.types import CallReport, SandboxSpec
from rayapp.sandbox.local.canary import Canary
from rayapp.sandbox.local.levels import landlock
from rayapp.sandbox.local.levels.limits import longest_s
from rayapp.sandbox.local.provider import LEVELS, LocalProvider
from rayapp.sandbox.local.sandbox import LocalSandbox

FOLDER = Path(__file__).with_name("battery")

PRELUDE = '''
import ctypes, errno, os, signal, socket, struct, sys, time

_libc = ctypes.CDLL(None, use_errno=True)
reached = []

def attempt(what, action):
    """Call `action`; if it succeeds, append `what` to `reached`. OSError and IndexError mean that it was refused; any
    other error means that the attack is broken."""
    try:
        action()
    except (OSError, IndexError):
        return
    reached.append(what)

def text_of(path):
    """Return a file's text; empty if the file can't be read."""
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
    """Call a function of libc; raise OSError if it returns -1."""
    result = getattr(_libc, name)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def syscall(name, *args):
    """Make a system call by its name. A call that this architecture lacks counts as refused."""
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
    """Required end of an attack if the sandbox holds. All given fields apply. Without fields the attack must return an
    empty list."""

    stopped: tuple[str, ...] = ()
    """Causes: the sandbox must have stopped the attack for one of them."""
    ended: bool = False
    """True if the attack may end in any way, as long as it returns nothing."""
    any_end: bool = False
    """True if the attack may return anything: only the state afterwards counts."""
    within_s: float | None = None
    """Maximum seconds of wall clock; None allows as many as code with this time limit may take on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One program that tries to break out."""

    family: str
    name: str
    code: str
    because: str = ""
    """Reason for the attack, or for leaving a level out."""
    levels: tuple[str, ...] = LEVELS
    """Levels that must withstand the attack. A name without `+lo` covers the level with and without a loopback."""
    unisolated: Literal["must-reach", "may-fail", "never"] = "must-reach"
    """Required result without isolation, as an ordinary user: reaches something; may fail; must not be run."""
    needs: tuple[str, ...] = ()
    """Parts of the canary that the attack needs besides the ones that are always present."""
    also_held: tuple[str, ...] = ()
    """Names of exceptions that also mean that the attack was refused."""
    timeout_s: float = 3.0
    expect: Expected = field(default_factory=Expected)

    def is_for(self, level: str) -> bool:
        """Return True if this level must withstand the attack."""
        return level in self.levels or level.removesuffix("+lo") in self.levels

    @property
    def source(self) -> str:
        return f"PROGRAM = {self.code!r}\n{PRELUDE}"


@functools.cache
def load_attacks() -> tuple[Attack, ...]:
    """Load every attack, family by family.

    Raises:
        ValueError: a file of this package is malformed, which is a bug.
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
    """Convert a YAML entry to the dataclass's arguments."""
    return {key.replace("-", "_"): tuple(value) if isinstance(value, list) else value for key, value in entry.items()}


_HONEST = """
import json, math
def f(items):
    print("honest")
    return json.loads(json.dumps([math.floor(item) for item in sorted(items)]))
"""
_BATTERY_FAMILIES = ("files", "kernel", "loopback", "network", "processes", "secrets")
"""Families of quick attacks: the whole battery takes about a second."""
_BOOT_TIMEOUT_S = 60.0
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """One attack and its result."""

    name: str
    passed: bool
    found: str
    """Description of the things that the code reached or broke; empty if the sandbox held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """Isolation of candidate code on this node."""

    level: str
    """ns+proc, ns, ll, unisolated, or none; if none, `refused` has the reasons."""
    uid: int
    """User id of candidate code on this machine; -1 if nothing runs."""
    landlock_abi: int
    """Version of Landlock; 0 if the kernel has none."""
    checks: tuple[AttackResult, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """Stronger levels that this node does not offer, each with its failed step."""

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)


async def run_doctor(*, levels: tuple[str, ...] = LEVELS, families: tuple[str, ...] | None = None) -> IsolationReport:
    """Attack the strongest of these levels that this node offers.

    Args:
        families: families of attacks to run; None runs all quick ones.
    """
    families = _BATTERY_FAMILIES if families is None else families
    provider = LocalProvider(levels=levels)
    try:
        sandbox = await provider.create(SandboxSpec(), labels={}, ttl_s=600.0, timeout_s=_BOOT_TIMEOUT_S)
    except IsolationUnavailableError:
        return IsolationReport(
            level="none", uid=-1, landlock_abi=landlock.abi(), refused=tuple(provider.refused.items())
        )
    else:
        attacks = [
            attack for attack in load_attacks() if attack.family in families and attack.is_for(sandbox.isolation)
        ]
        with Canary(sandbox.slot) as canary:
            checks = [await try_attack(sandbox, attack, canary) for attack in attacks]
        return IsolationReport(
            level=sandbox.isolation,
            uid=sandbox.slot.uid,
            landlock_abi=landlock.abi(),
            checks=tuple(checks),
            refused=tuple(provider.refused.items()),
        )
    finally:
        await provider.close()


async def try_attack(sandbox: LocalSandbox, attack: Attack, canary: Canary) -> AttackResult:
    """Run one attack, then an honest program, then check what must not have changed."""
    try:
        facts = {**canary.facts, **await _earlier_execution(sandbox, attack)}
        report = await sandbox.call_function(attack.source, "attack", [[facts]], timeout_s=attack.timeout_s)
        problems = [*judge(attack, report), *canary.damage(), *await _honest_problems(sandbox)]
    except SandboxError as error:
        # Count this as a finding: code that can end its own sandbox may end other sandboxes too.
        problems = [f"the sandbox failed: {error}"]
    return AttackResult(name=attack.name, passed=not problems, found="; ".join(problems))


def judge(attack: Attack, report: CallReport) -> list[str]:
    """Return the differences between an attack's end and its expected end; empty if the sandbox held."""
    expect, ran, call = attack.expect, report.exec, report.calls[0]
    problems = []
    within_s = expect.within_s if expect.within_s is not None else longest_s(attack.timeout_s) + _GRACE_S
    if ran.duration_s > within_s:
        problems.append(f"took {ran.duration_s:.2f} s, at most {within_s:g} s were allowed")
    if expect.any_end:
        return problems
    if expect.stopped:
        if ran.stopped_for is None or ran.stopped_for.value not in expect.stopped:
            problems.append(f"ended with {ran.stopped_for or ran.outcome}, not stopped for {', '.join(expect.stopped)}")
    elif expect.ended:
        problems += [f"it went on and returned {call.value!r}"] if call.ok else []
    elif call.ok:
        problems += (
            [f"reached {', '.join(map(str, call.value))}"] if isinstance(call.value, list) and call.value else []
        )
    elif not call.error.startswith(attack.also_held or ("\0",)):
        problems.append(f"the attack itself broke: {call.error or ran.error}")
    return problems


async def _earlier_execution(sandbox: LocalSandbox, attack: Attack) -> dict[str, object]:
    """Run the execution whose traces the attack searches for, and return its mark; do nothing for other attacks."""
    if "previous" not in attack.needs:
        return {}
    mark = secrets.token_hex(24)
    await sandbox.call_function("def f(x):\n    return [x, x + x]", "f", [[mark]], timeout_s=5.0)
    return {"previous_xor": [code ^ 1 for code in mark.encode()]}


async def _honest_problems(sandbox: LocalSandbox) -> list[str]:
    report = await sandbox.call_function(_HONEST, "f", [[[2.5, 1.5]], [[]]], timeout_s=10.0)
    if (
        report.exec.ok
        and report.exec.stdout == "honest\nhonest\n"
        and [call.value for call in report.calls] == [[1, 2], []]
    ):
        return []
    return [f"the next honest program failed: {report.exec.error or report.calls}"]


def format_report(report: IsolationReport) -> str:
    """Format the report as text."""
    lines = [
        f"isolation level  {report.level}",
        f"user id of code  {report.uid}",
        f"Landlock         ABI {report.landlock_abi}",
    ]
    lines += [f"not offered      {level}: {why}" for level, why in report.refused]
    held = sum(check.passed for check in report.checks)
    lines.append(f"attacks held     {held} of {len(report.checks)}")
    lines += [
        f"  {'held  ' if check.passed else 'BROKEN'}  {check.name}{': ' if check.found else ''}{check.found}"
        for check in report.checks
    ]
    return "\n".join(lines)
