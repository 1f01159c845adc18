"""`metrics.jsonl`: one line a step, on disk before the next step starts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonlTracker:
    """Appends to a file.

    Args:
        path: made if missing; a resumed run cuts the lines of later steps before this opens it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Not-a-number is no JSON, and readers in other languages stop at it.
        record = {"step": step, "time": time.time()} | {k: float(v) for k, v in sorted(metrics.items()) if v == v}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl; a line that a crash cut short ends it."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
