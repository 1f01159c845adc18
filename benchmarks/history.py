"""What benchmarks found before, and whether a ratio has fallen since. Called by `python -m benchmarks`.

A report is what a benchmark prints: one JSON object with `settings`, `machine` and `ratios`, beside figures of its own.
Only ratios are compared: both sides of each are of one run, so they hold on another day, and higher is always better.
Reports are comparable when machine kind and settings are equal; their file names then end alike:

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

MAX_LOSS = 0.10
"""Of a ratio since the last record; more is flagged."""
KIND = ("cpu", "cores", "gpu")
"""What makes two machines comparable."""

Report = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One ratio, now and when it was last recorded."""

    name: str
    now: float | None
    """None: it was recorded, and is not reported any more."""
    before: float | None
    """None: it is new."""

    @property
    def change(self) -> float:
        """-0.25: a quarter is lost. 0 when it is new, -1 when it is gone."""
        if self.before is None:
            return 0.0
        return (self.now or 0.0) / self.before - 1

    @property
    def is_lost(self) -> bool:
        # Rounded: 0.9 of a ratio is a loss of 10%, not of 10.000000000000009%.
        return round(self.change, 9) < -MAX_LOSS


def check(report: Report) -> None:
    """Return if it can be recorded and compared.

    Raises:
        ValueError: what is missing, or which ratio is no positive number.
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
    """Equal for reports that may be compared: 8 hexadecimal digits of machine kind and settings."""
    kind = {key: report["machine"].get(key, "") for key in KIND}
    told = json.dumps([kind, report["settings"]], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def record_path(folder: Path, report: Report) -> Path:
    """Where the report of this commit belongs. The same commit measured again takes the place of the first."""
    return folder / f"{report['machine']['commit'][:12]}-{digest(report)}.json"


def last_record(folder: Path, report: Report) -> dict[str, Any] | None:
    """The newest comparable record; None when there is none."""
    found = [json.loads(path.read_text()) for path in folder.glob(f"*-{digest(report)}.json")]
    return max(found, key=lambda record: str(record["recorded_at"]), default=None)


def compare(report: Report, record: Report | None) -> list[Compared]:
    """Every ratio of either, those of the report first."""
    now, before = report["ratios"], record["ratios"] if record else {}
    return [Compared(name=name, now=now.get(name), before=before.get(name)) for name in {**now, **before}]


def table(compared: list[Compared]) -> str:
    """One line a ratio: name, before, now, change."""
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
