"""How the end of an attack is judged: a battery that lets everything pass would prove nothing."""

from __future__ import annotations

import pytest

from rayapp.core.types import CallReport, CallResult, ExecOutcome, ExecResult, StopCause
from rayapp.sandbox.local.provider import LEVELS, LOOPBACK_LEVELS
from support.isolation import Attack, Expected, judge, load_attacks


def report(call: CallResult, *, stopped: StopCause | None = None, duration_s: float = 0.1) -> CallReport:
    outcome = ExecOutcome.OK if stopped is None else ExecOutcome.CODE_STOPPED
    ran = ExecResult(
        outcome=outcome, exit_code=0, stdout="", stderr="", duration_s=duration_s, stopped_for=stopped, isolation="ns"
    )
    return CallReport(exec=ran, calls=(call,))


NOTHING = CallResult(ok=True, value=[])
REACHED = CallResult(ok=True, value=["/etc/shadow"])
NO_RESULT = CallResult(ok=False, error="no result: ended by SIGKILL")
REFUSED = CallResult(ok=False, error="PermissionError: [Errno 1]")
STOPPED, ENDED, IN_TIME = Expected(stopped=("timeout",)), Expected(ended=True), Expected(any_end=True, within_s=1.0)
NOT_AN_END = "not held"


@pytest.mark.parametrize(
    ("expect", "ended", "problem"),
    [
        (Expected(), report(NOTHING), ""),
        (Expected(), report(REACHED), "reached /etc/shadow"),
        (Expected(), report(REFUSED), "the attack itself broke: PermissionError"),
        (STOPPED, report(NO_RESULT, stopped=StopCause.TIMEOUT), ""),
        (STOPPED, report(NO_RESULT, stopped=StopCause.OUTPUT), NOT_AN_END),
        (STOPPED, report(NO_RESULT), NOT_AN_END),
        (STOPPED, report(NOTHING), NOT_AN_END),
        (ENDED, report(NO_RESULT), ""),
        (ENDED, report(REACHED), NOT_AN_END),
        (IN_TIME, report(REACHED, duration_s=0.9), ""),
        (IN_TIME, report(REACHED, duration_s=1.1), "took 1.10 s, at most 1 s were allowed"),
    ],
)
def test_an_attack_was_held_only_if_it_ended_as_expected(expect: Expected, ended: CallReport, problem: str) -> None:
    found = judge(Attack(family="files", name="reads", code="", expect=expect), ended)

    assert bool(found) == bool(problem)
    assert problem in (NOT_AN_END, "") or found[0].startswith(problem)


def test_an_exception_that_means_refused_is_held() -> None:
    held = Attack(family="files", name="reads", code="", also_held=("PermissionError",))

    assert judge(held, report(REFUSED)) == []


def test_every_attack_of_the_battery_is_python_for_known_levels() -> None:
    attacks = load_attacks()
    assert len(attacks) >= 80
    for each in attacks:
        compile(each.code, each.name, "exec")
        assert each.levels == LEVELS or each.because or each.family == "loopback"
        assert set(each.levels) <= set(LOOPBACK_LEVELS if each.family == "loopback" else LEVELS)
