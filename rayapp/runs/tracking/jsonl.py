"""`metrics.jsonl`: one line a step, on disk before the next step starts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonlTracker:
    """Appends to a file.

    Args:
        path: made if missing. It is opened for every step: a run that resumes replaces the file to cut its end, and a
            handle from before would go on writing into the one that is gone.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Not-a-number is no JSON, and readers in other languages stop at it.
        record = {"step": step, "time": time.time()} | {k: float(v) for k, v in sorted(metrics.items()) if v == v}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Nothing is held."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; none where there is no such file."""
    return list(read_records(path.read_bytes().splitlines())) if path.exists() else []


def read_records(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Records with a step. A line that is none, cut short by a crash or written by another hand, is left out."""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int | float):
            yield record
