"""How the end of an attack is judged: a battery that lets everything pass would prove nothing."""

from __future__ import annotations

import pytest

from rayapp.core.types import CallReport, CallResult, ExecOutcome, ExecResult, StopCause
from rayapp.sandbox.local.provider import LEVELS, LOOPBACK_LEVELS
from support.isolation import Attack, Expected, judge, load_attacks


def attack(expect: Expected | None = None, also_held: tuple[str, ...] = ()) -> Attack:
    return Attack(family="files", name="reads", code="", expect=expect or Expected(), also_held=also_held)


def report(call: CallResult, *, stopped: StopCause | None = None, duration_s: float = 0.1) -> CallReport:
    outcome = ExecOutcome.OK if stopped is None else ExecOutcome.CODE_STOPPED
    ran = ExecResult(
        outcome=outcome, exit_code=0, stdout="", stderr="", duration_s=duration_s, stopped_for=stopped, isolation="ns"
    )
    return CallReport(exec=ran, calls=(call,))


RETURNED_NOTHING = CallResult(ok=True, value=[])
REACHED = CallResult(ok=True, value=["/etc/shadow"])
NO_RESULT = CallResult(ok=False, error="no result: ended by SIGKILL")


def test_an_attack_that_reached_nothing_was_held() -> None:
    assert judge(attack(), report(RETURNED_NOTHING)) == []


def test_what_was_reached_is_named() -> None:
    assert judge(attack(), report(REACHED)) == ["reached /etc/shadow"]


def test_an_attack_that_breaks_is_not_held() -> None:
    problems = judge(attack(), report(CallResult(ok=False, error="NameError: name 'x' is not defined")))
    assert problems == ["the attack itself broke: NameError: name 'x' is not defined"]


def test_an_exception_that_means_refused_is_held() -> None:
    refused = CallResult(ok=False, error="PermissionError: [Errno 1]")
    assert judge(attack(also_held=("PermissionError",)), report(refused)) == []
    assert judge(attack(), report(refused)) != []


@pytest.mark.parametrize(
    ("call", "stopped", "is_held"),
    [
        (NO_RESULT, StopCause.TIMEOUT, True),
        (NO_RESULT, StopCause.OUTPUT, False),
        (NO_RESULT, None, False),
        (RETURNED_NOTHING, None, False),
    ],
)
def test_an_attack_that_has_to_be_stopped_is_held_only_by_that_cause(
    call: CallResult, stopped: StopCause | None, is_held: bool
) -> None:
    problems = judge(attack(Expected(stopped=("timeout",))), report(call, stopped=stopped))
    assert (problems == []) is is_held


def test_an_attack_that_ends_itself_must_not_go_on() -> None:
    assert judge(attack(Expected(ended=True)), report(NO_RESULT)) == []
    assert judge(attack(Expected(ended=True)), report(REACHED)) != []


def test_however_it_ends_it_ends_in_time() -> None:
    expect = Expected(any_end=True, within_s=1.0)
    assert judge(attack(expect), report(REACHED, duration_s=0.9)) == []
    assert judge(attack(expect), report(REACHED, duration_s=1.1)) == ["took 1.10 s, at most 1 s were allowed"]


def test_every_attack_of_the_battery_is_python_for_known_levels() -> None:
    attacks = load_attacks()
    assert len(attacks) >= 80
    for each in attacks:
        compile(each.code, each.name, "exec")
        assert each.levels == LEVELS or each.because or each.family == "loopback"
        assert set(each.levels) <= set(LOOPBACK_LEVELS if each.family == "loopback" else LEVELS)
