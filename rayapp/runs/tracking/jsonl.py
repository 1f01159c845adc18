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


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl; a line that a crash cut short ends it."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return
