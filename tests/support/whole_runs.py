"""Helpers for tests of whole runs: rows to train on, a run's metrics and groups, and a wait for a process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from rayapp.core.types import Group
from rayapp.runs.trajectories import read_groups
from support import timing


def write_rows(file: Path, *questions: str, truth: str = "42") -> str:
    """Write a row in verl's schema for each question, all with this answer. Return the file's path."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question}],
            "reward_model": {"style": "rule", "ground_truth": truth},
        }
        for question in questions
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run folder, one mapping for each step; empty before the first."""
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def groups_of(folder: Path) -> list[Group]:
    """Return all groups that a run was trained on, by step."""
    return [group for path in sorted((folder / "trajectories").glob("step=*")) for group in read_groups(path)]


def wait_until(
    reached: Callable[[], bool], process: subprocess.Popen[Any], output: Callable[[], str], *, timeout_s: float = 600.0
) -> None:
    """Return when the condition holds; AssertionError with what `output` returns if the process ends before."""
    timing.wait_until(reached, output, process=process, timeout_s=timeout_s)


def lives(process: psutil.Process) -> bool:
    """Return True while the process runs; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
