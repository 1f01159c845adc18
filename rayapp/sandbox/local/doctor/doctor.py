"""Finds out what this node's isolation is worth, by attacking it. Called by `rayapp sandbox doctor` and by the tests.

    for each level: start a zygote -> for each attack: run it, judge it, run an honest program -> IsolationReport

The report is plain data. It never changes anything on the node but what a broken sandbox lets an attack change.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from rayapp.core.errors import IsolationUnavailableError, SandboxError
from rayapp.core.types import CallReport, SandboxSpec
from rayapp.sandbox.local.doctor.attacks import Attack, load_attacks
from rayapp.sandbox.local.doctor.canary import Canary
from rayapp.sandbox.local.levels import landlock
from rayapp.sandbox.local.levels.limits import longest_s
from rayapp.sandbox.local.provider import LEVELS, LocalProvider
from rayapp.sandbox.local.sandbox import LocalSandbox

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
class Check:
    """One attack and what came of it."""

    name: str
    passed: bool
    found: str
    """What the code reached or broke; empty when it was kept in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationReport:
    """What keeps code in on this node."""

    level: str
    """ns+proc, ns, ll, unisolated, or none: then `refused` says why."""
    uid: int
    """User id of candidate code on this machine; -1 when nothing runs."""
    landlock_abi: int
    """0 when the kernel has none."""
    checks: tuple[Check, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """Stronger levels that this node does not offer, each with the step that failed."""

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)


async def run_doctor(*, levels: tuple[str, ...] = LEVELS, families: tuple[str, ...] | None = None) -> IsolationReport:
    """Attack the strongest of these levels that this node offers.

    Args:
        families: families of attacks to run; None runs all that are quick.
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


async def try_attack(sandbox: LocalSandbox, attack: Attack, canary: Canary) -> Check:
    """Run one attack, then an honest program, then look at what must not have changed."""
    try:
        facts = {**canary.facts, **await _earlier_execution(sandbox, attack)}
        report = await sandbox.call_function(attack.source, "attack", [[facts]], timeout_s=attack.timeout_s)
        problems = [*judge(attack, report), *canary.damage(), *await _honest_problems(sandbox)]
    except SandboxError as error:
        # Count it as a finding: code that can end its sandbox can cost others theirs.
        problems = [f"the sandbox failed: {error}"]
    return Check(name=attack.name, passed=not problems, found="; ".join(problems))


def judge(attack: Attack, report: CallReport) -> list[str]:
    """What is wrong with how an attack ended; empty when the sandbox held."""
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
    """Run the execution whose traces the attack looks for, if it does, and return the mark that it left."""
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
    """The report as text for a person."""
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
