"""metrics.jsonl of a run as curves: read on from where the last look ended, thinned to what a screen can show.

Called by the server for each look at the curves. A run that resumes cuts the file; then it is read anew.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

from rayapp.runs.tracking.jsonl import read_records
from rayapp.runs.view.source import RunSource

MAX_POINTS = 600
Curves = dict[str, dict[str, list[float]]]
"""By metric: {"steps": [...], "values": [...]}."""


class Metrics:
    """The records of a run so far.

    Args:
        source: the run.
    """

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._records: list[dict[str, Any]] = []
        self._num_bytes = 0
        self._last_line = b""
        self._stamp: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def records(self) -> list[dict[str, Any]]:
        """Everything logged, in the order of steps."""
        with self._lock:
            stamp = self._source.stamp("metrics.jsonl")
            if stamp != self._stamp:
                self._read_on()
                self._stamp = stamp
            return self._records

    def _read_on(self) -> None:
        """Add the lines since the last look, or read all again when the line before them is not where it was."""
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
    """Every metric that some step has."""
    return sorted({key for record in records for key in record} - {"step", "time"})


def curve(
    records: Sequence[dict[str, Any]], key: str, *, max_points: int = MAX_POINTS, absent: float | None = None
) -> dict[str, list[float]]:
    """{"steps": [...], "values": [...]} of a metric; with more steps than points, means of equal stretches of steps.

    Args:
        absent: value of a step that lacks the metric; None leaves the step out.

    Example: steps 1..4, values [0, 1, 2, 3], 2 points -> steps [1.5, 3.5], values [0.5, 2.5].
    """
    values: list[tuple[Any, Any]] = [(record["step"], record.get(key, absent)) for record in records]
    found = [(float(step), float(value)) for step, value in values if _is_number(value)]
    size = max(1, math.ceil(len(found) / max_points))
    stretches = [found[start : start + size] for start in range(0, len(found), size)]
    means = [(_mean([s for s, _ in stretch]), _mean([v for _, v in stretch])) for stretch in stretches]
    return {"steps": [step for step, _ in means], "values": [value for _, value in means]}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
