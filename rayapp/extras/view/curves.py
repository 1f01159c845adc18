"""Curves of a run's metrics.jsonl: read incrementally, thinned to the resolution of a screen; and the panels for them.

A resumed run cuts the file; then it is read from the start. The page shows the panels that have data.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rayapp.runs.source import RunSource
from rayapp.runs.tracking.metrics import read_records

MAX_POINTS = 600
Curves = dict[str, dict[str, list[float]]]  # Metric -> {"steps": [...], "values": [...]}.


class Metrics:
    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._records: list[dict[str, Any]] = []
        self._num_bytes = 0
        self._last_line = b""
        self._stamp: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def records(self) -> list[dict[str, Any]]:
        """Return all logged records, in the order of steps."""
        with self._lock:
            stamp = self._source.stamp("metrics.jsonl")
            if stamp != self._stamp:
                self._read_on()
                self._stamp = stamp
            return self._records

    def _read_on(self) -> None:
        """Read the lines added since the last call; read all again if the file was cut."""
        start = self._num_bytes - len(self._last_line)
        new = self._source.read_bytes("metrics.jsonl", offset=start) or b""
        if not new.startswith(self._last_line):
            self._records, start = [], 0
            new = self._source.read_bytes("metrics.jsonl") or b""
        elif self._last_line:
            new, start = new[len(self._last_line) :], self._num_bytes
        whole = new[: new.rfind(b"\n") + 1]  # a line that is being written has no end yet
        self._num_bytes = start + len(whole)
        self._last_line = next(reversed(whole.splitlines(keepends=True)), self._last_line if start else b"")
        self._records = [*self._records, *read_records(whole.splitlines())]


def keys_of(records: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({key for record in records for key in record} - {"step", "time"})


def curve(
    records: Sequence[dict[str, Any]], key: str, *, max_points: int = MAX_POINTS, absent: float | None = None
) -> dict[str, list[float]]:
    """Return {"steps": [...], "values": [...]} of a metric; means of equal ranges if there are more steps than points.

    Args:
        absent: value for a trained step without the metric; None leaves the step out.
    """
    values: list[tuple[int, Any]] = [(row["step"], row.get(key, absent if row["step"] else None)) for row in records]
    found = [(float(step), float(value)) for step, value in values if _is_number(value)]
    size = max(1, math.ceil(len(found) / max_points))
    stretches = [found[start : start + size] for start in range(0, len(found), size)]
    means = [(_mean([s for s, _ in stretch]), _mean([v for _, v in stretch])) for stretch in stretches]
    return {"steps": [step for step, _ in means], "values": [value for _, value in means]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart, as `panels.yaml` describes it."""

    section: str
    title: str
    meaning: str
    keys: Sequence[str]
    unit: str = ""
    floor: float | None = None
    ceiling: float | None = None
    omits: Sequence[str] = ()
    absent_is_zero: bool = False


_YAML = yaml.safe_load((Path(__file__).parent / "panels.yaml").read_text())
PANELS = tuple(Panel(section=section, **fields) for section, charts in _YAML.items() for fields in charts)


def keys_of_panel(panel: Panel, known: Sequence[str]) -> list[str]:
    """Return the metrics of `known` that a panel shows, in its order: `reward/*/mean` excludes `reward/mean`."""
    shown: dict[str, None] = {}
    for pattern in panel.keys:
        head, star, tail = pattern.partition("*")
        if star:  # the star must match at least one character
            long = (key for key in known if len(key) > len(head) + len(tail))
            shown |= dict.fromkeys(key for key in long if key.startswith(head) and key.endswith(tail))
        elif pattern in known:
            shown[pattern] = None
    return [key for key in shown if key not in panel.omits]
