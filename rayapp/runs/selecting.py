"""Selects trajectories of a run that are worth learning from, as a file of demonstrations (`rayapp data from-run`).

This is rejection sampling: a later `warmup` or `rayapp sft` trains on the token ids as sampled (docs/sft.md).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayapp.core.errors import InputError, one_line
from rayapp.core.files import aside
from rayapp.runs.trajectories import SCHEMA

READ = ["step", "group_id", "task", "prompt", "completion", "reward", "valid", "token_ids", "response_mask",
        "forks"]  # fmt: skip
WRITTEN = pa.schema([SCHEMA.field(name) for name in READ if name != "valid"])
BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Criteria for the trajectories to select."""

    min_reward: float
    max_per_prompt: int | None = None
    """Most trajectories per prompt, the earliest first; None takes all."""
    first_step: int = 1
    last_step: int | None = None


@dataclass(slots=True, kw_only=True)
class Selected:
    """Numbers of trajectories read and written."""

    num_read: int = 0
    num_written: int = 0
    num_repeated: int = 0
    """Left out because another trajectory of the same prompt has the same tokens."""


def select_from_run(run: Path, out: Path, selection: Selection) -> Selected:
    """Write the selection to `out`, a parquet file, aside and then renamed. Failed trajectories are never selected.

    Raises:
        InputError: the run kept no trajectories, one of its files can't be read, or no trajectory meets the criteria.
    """
    files = [file for file in sorted((run / "trajectories").glob("step=*.parquet")) if _is_wanted(file, selection)]
    if not files:
        raise InputError(
            f"{run / 'trajectories'} holds no steps to choose from: name the folder of a run that was trained with "
            "tracking.trajectories: true"
        )
    count = Selected()
    out.parent.mkdir(parents=True, exist_ok=True)
    with aside(out) as pending:
        with pq.ParquetWriter(pending, WRITTEN, compression="zstd") as writer:
            chosen = _chosen(files, selection, count)
            while rows := list(islice(chosen, BATCH_ROWS)):
                writer.write_table(pa.Table.from_pylist(rows, schema=WRITTEN))
        if not count.num_written:
            raise InputError(
                f"none of {count.num_read} trajectories in {run} has a reward of {selection.min_reward:g} or more: "
                "lower --min-reward"
            )
    return count


def _is_wanted(file: Path, selection: Selection) -> bool:
    step = int(file.stem.removeprefix("step="))
    return step >= selection.first_step and (selection.last_step is None or step <= selection.last_step)


def _chosen(files: list[Path], selection: Selection, count: Selected) -> Iterator[dict[str, Any]]:
    taken, seen = Counter[str](), set[bytes]()
    for row in _rows(files):
        count.num_read += 1
        prompt = row["prompt"]
        if not row.pop("valid") or row["reward"] < selection.min_reward:
            continue
        # Include the mask: a tool's output and the policy's own text may be the same tokens.
        key = hashlib.sha256(repr((prompt, row["token_ids"], row["response_mask"], row["forks"])).encode()).digest()
        if key in seen:
            count.num_repeated += 1
        elif selection.max_per_prompt is None or taken[prompt] < selection.max_per_prompt:
            seen.add(key)
            taken[prompt] += 1
            count.num_written += 1
            yield row


def _rows(files: list[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        try:
            yield from pq.read_table(file, columns=READ).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{file} can't be read: {one_line(error)}") from error
