"""Keeps records of reports, and finds ratios that have fallen since the last record. `python -m benchmarks` calls it.

A benchmark prints a report: one JSON object with `settings`, `machine` and `ratios`, and further figures. Only ratios
are compared: both sides of a ratio are measured in one run, so the ratio stays valid on another day. Higher is always
better. Reports are comparable if machine kind and settings are equal. The names of their files then have the same
ending:

    benchmarks/records/driver/05e6940a1b2c-3f9a1c20.json        commit, and a digest of machine kind and settings
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LOSS = 0.05
"""Fraction of a ratio that may be lost since the last record. A larger loss is reported."""
KIND = ("cpu", "instructions", "cores", "gpu")
"""Keys of `machine` that must be equal for two reports to be comparable."""

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A benchmark's ratio now, and the last recorded value."""

    name: str
    now: float | None
    """Ratio in this report; None if the benchmark does not report the ratio any more."""
    before: float | None
    """Ratio in the last record; None if the ratio is new."""

    @property
    def change(self) -> float:
        """The relative change, e.g. -0.25 if a quarter is lost. It is 0 for a new ratio, and -1 for a ratio that is
        gone.
        """
        if self.before is None:
            return 0.0
        return (self.now or 0.0) / self.before - 1

    @property
    def is_lost(self) -> bool:
        # Round the change: 0.95 of a ratio is a loss of 5%, not of 5.000000000000004%.
        return round(self.change, 9) < -MAX_LOSS


def check(report: Report) -> None:
    """Check that a report can be recorded and compared.

    Raises:
        ValueError: a part is missing, or a ratio is not a positive number. The message names it.
    """
    missing = [key for key in ("settings", "machine", "ratios") if not isinstance(report.get(key), dict)]
    if missing:
        raise ValueError(f"the report has no {', '.join(missing)}; it must be an object with settings, machine, ratios")
    if not report["ratios"]:
        raise ValueError("the report has no ratio, so there is nothing to compare")
    wrong = {name: r for name, r in report["ratios"].items() if not _is_positive(r)}
    if wrong:
        raise ValueError(f"ratios must be positive numbers, got {wrong}")


def _is_positive(ratio: object) -> bool:
    return isinstance(ratio, int | float) and not isinstance(ratio, bool) and math.isfinite(ratio) and ratio > 0


def digest(report: Report) -> str:
    """Return a hash of machine kind and settings, in 8 hexadecimal digits. It is equal for comparable reports."""
    kind = {key: report["machine"].get(key, "") for key in KIND}
    told = json.dumps([kind, report["settings"]], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def record_path(folder: Path, report: Report) -> Path:
    """Return the path of this commit's record. A second measurement of the same commit replaces the first."""
    return folder / f"{report['machine']['commit'][:12]}-{digest(report)}.json"


def last_record(folder: Path, report: Report) -> dict[str, Any] | None:
    """Return the newest comparable record; None if there is none."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"*-{digest(report)}.json")]
    return max(found, key=lambda record: str(record["recorded_at"]), default=None)


def compare(report: Report, record: Report | None) -> list[Compared]:
    """Return every ratio of the report or the record. Ratios of the report come first."""
    now, before = report["ratios"], record["ratios"] if record else {}
    return [Compared(name=name, now=now.get(name), before=before.get(name)) for name in {**now, **before}]


def better_of(first: Report, second: Report) -> dict[str, Any]:
    """Return the second report. Each of its ratios is replaced by that of the first report if that one is better."""
    both = {name: max(r, first["ratios"].get(name, r)) for name, r in second["ratios"].items()}
    return {**second, "ratios": both}


def table(compared: list[Compared]) -> str:
    """Return a text with one line for each ratio: name, before, now, change."""
    width = max(len(each.name) for each in compared)
    return "\n".join(
        f"  {each.name:{width}}  {_number(each.before):>10}  {_number(each.now):>10}  {_verdict(each)}"
        for each in compared
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _verdict(each: Compared) -> str:
    if each.before is None:
        return "new"
    if each.now is None:
        return "LOST: not reported any more"
    return f"{each.change:+.1%}" + ("  LOST" if each.is_lost else "")
