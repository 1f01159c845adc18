"""What changed files are worth: hidden tests in a fresh sandbox, which gets the repository with the changes alone.

    changed files -> the repository with them -> one interpreter per test -> values of its probes -> compared here

No expected value enters the sandbox, and nothing that an agent left behind: no process, no bytecode, no file that was
not handed in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayapp.core.protocols import Sandbox
from rayapp.core.types import Reward
from rayapp.tasks.repository.hidden_tests import PROBE, HiddenTest

_ENTRY = "_rayapp_entry"
_INSIDE = f"""
def {_ENTRY}(files, source):
    import os, sys, tempfile
    folder = tempfile.mkdtemp()
    for path, text in files.items():
        target = os.path.join(folder, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, 'w', encoding='utf-8', newline='') as file:
            file.write(text)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    values = []
    def plain(value):
        for kind in (bool, int, float, str, bytes):
            if isinstance(value, kind):
                return kind(value)
        for kind in (list, tuple, set):
            if isinstance(value, kind):
                return kind([plain(part) for part in value])
        if isinstance(value, dict):
            return {{plain(key): plain(item) for key, item in value.items()}}
        return value
    names = {{'__name__': 'hidden', {PROBE!r}: lambda value: values.append(plain(value))}}
    exec(compile(source, '<hidden test>', 'exec'), names)
    return values
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One hidden test on a repository."""

    problem: str
    """Why it is failed; empty where it is passed."""
    seconds: float


async def run_tests(
    sandbox: Sandbox, repository: Mapping[str, str], tests: Sequence[HiddenTest], *, timeout_s: float
) -> list[Outcome]:
    """Every test, in an interpreter of its own.

    Args:
        repository: all of its files, by relative path.
        timeout_s: for all of them. Those that are left are failed.
    Raises:
        SandboxError: the sandbox failed.
    """
    ends_at, outcomes = time.monotonic() + timeout_s, []
    for test in tests:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            outcomes.append(Outcome(problem="out of time", seconds=0.0))
            continue
        inputs = [[dict(repository), test.source]]
        report = await sandbox.call_function(_INSIDE, _ENTRY, inputs, timeout_s=left_s)
        (call,), ran = report.calls, report.exec
        problem = f"stopped for {ran.stopped_for.value}" if ran.stopped_for else ran.error or call.error
        if not problem and not (ran.ok and call.ok and test.is_passed(call.value)):
            problem = "wrong value"
        outcomes.append(Outcome(problem=problem, seconds=ran.duration_s))
    return outcomes


def verdict(tests: Sequence[HiddenTest], outcomes: Sequence[Outcome], *, pays_share: bool) -> Reward:
    """1 where all tests are passed, else 0; or the share of those passed.

    Terms: `pass_rate` and `solved`.
    """
    failed = [(test, outcome) for test, outcome in zip(tests, outcomes, strict=True) if outcome.problem]
    share = 1 - len(failed) / len(tests)
    solved = float(not failed)
    detail = f"{failed[0][0].name}: {failed[0][1].problem}" if failed else ""
    return Reward(value=share if pays_share else solved, terms={"pass_rate": share, "solved": solved}, detail=detail)


def no_answer(detail: str) -> Reward:
    """The verdict on a text that hands nothing in."""
    return Reward(value=0.0, terms={"pass_rate": 0.0, "solved": 0.0}, status="no_code", detail=detail)
