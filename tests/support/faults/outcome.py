"""Result of a fault run: counts and their report. Data only; the outcomes of several processes can be added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(slots=True)
class Outcome:
    """Counts of one fault run."""

    executions: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    invalid: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    hung: int = 0
    leaked: dict[str, int] = field(default_factory=dict)
    leases_left: float = 0.0
    reclaimed: float = 0.0
    strays_ended: float = 0.0
    reported_left: int = 0
    """Number of sandboxes that pools reported as impossible to end."""
    injected: dict[str, int] = field(default_factory=dict)

    def report(self) -> dict[str, object]:
        """Return the counts as plain data for JSON."""
        invalid = sum(self.invalid.values())
        return {
            "executions": self.executions,
            "wrong_verdicts": len(self.wrong),
            "wrong_examples": self.wrong[:5],
            "leaked_sandboxes": sum(self.leaked.values()),
            "leaked_by_provider": self.leaked,
            "hung_executions": self.hung,
            "hung_leases": self.leases_left,
            "reclaimed_leases": self.reclaimed,
            "retried_share": self.retried / max(1, self.executions),
            "invalid_share": invalid / max(1, self.executions),
            "invalid_by_kind": dict(self.invalid),
            "verdicts": dict(self.verdicts),
            "strays_ended": self.strays_ended,
            "reported_left": self.reported_left,
            "faults_injected": sum(self.injected.values()),
            "faults_by_call": self.injected,
        }


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the sum of several runs' outcomes."""
    total = Outcome()
    for outcome in outcomes:
        for each in fields(Outcome):
            setattr(total, each.name, _sum(getattr(total, each.name), getattr(outcome, each.name)))
    return total


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return type(one)({key: one.get(key, 0) + other.get(key, 0) for key in [*one, *(set(other) - set(one))]})
    return one + other
