"""Scores answers by a reward function or a rule, for rows of data or a ground truth. Called by `command.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.cli.score import read_answers, verdict_fields
from rayapp.config.config import Config, with_values
from rayapp.core.aio import run_until_done
from rayapp.core.errors import InputError
from rayapp.core.types import Reward
from rayapp.tasks.answers import Answer, score_answer
from rayapp.tasks.data.data_row import DataRow, parse_row

SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What `rayapp try reward` is asked to do."""

    name: str
    """A function, `place:name`, or a data source that has a rule."""
    data: Path | None
    rows: range
    ground_truth: str
    seed: int
    config: Path | None

    @property
    def has_function(self) -> bool:
        return ":" in self.name


def try_reward(trial: Trial, texts: Sequence[str], files: Sequence[str]) -> bool:
    """Score and print.

    Returns:
        True if every answer has a verdict.
    Raises:
        UserError: the function, the rule, a file or a row can't be used.
    """
    from rayapp.config.loading import load_config
    from rayapp.rollout.data_groups import answer_rewards
    from rayapp.sandbox.pool.in_process import open_pool

    config = with_function(load_config(trial.config), trial)
    rewards = answer_rewards(config)
    if rewards.custom is not None:
        rewards.custom.load()
    answers = [*texts, *(found.text for file in files for found in read_answers(file))]
    given = list(rows_of(trial))
    for _, row in given:
        rewards.truth_kind(row.data_source)

    async def run() -> bool:
        all_valid = True
        async with open_pool(config.sandbox.without_stock, f"try-{os.getpid()}") as (pool, _):
            for number, row in given:
                for text in answers or _extremes(row):
                    verdict = await score_answer(_answer(row, text), rewards, pool, seed=trial.seed)
                    print(json.dumps(record(number, text, verdict)), flush=True)
                    all_valid &= verdict.valid
        return all_valid

    return run_until_done(run())


def with_function(config: Config, trial: Trial) -> Config:
    """The configuration with the function that is tried, if it is one."""
    return with_values(config, reward={"custom": trial.name if trial.has_function else ""})


def rows_of(trial: Trial) -> Iterator[tuple[int, DataRow]]:
    """The rows that answers are scored for, each with its number in the file.

    Raises:
        InputError: there is no such file or row, or a row is not in verl's schema.
    """
    if trial.data is None:
        source = "own" if trial.has_function else trial.name
        yield 0, DataRow(messages=(), data_source=source, ground_truth=trial.ground_truth)
        return
    yield from read_rows(trial.data, trial.rows)


def read_rows(file: Path, rows: range) -> Iterator[tuple[int, DataRow]]:
    """Rows of a parquet file, each with its number.

    Raises:
        InputError: there is no such file or row, or a row is not in verl's schema.
    """
    table = _read_table(file)
    if rows.start >= table.num_rows:
        raise InputError(f"{file} has {table.num_rows} rows, and no row {rows.start} (counted from 0)")
    for number in rows[: table.num_rows - rows.start]:
        yield number, parse_row(table.slice(number, 1).to_pylist()[0], f"{file}, row {number}")


def _read_table(file: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file} can't be read: {' '.join(str(error).split())[:200]}") from None


def _extremes(row: DataRow) -> list[str]:
    truth = row.ground_truth
    return [truth if isinstance(truth, str) else json.dumps(truth, default=str), ""]


def _answer(row: DataRow, text: str) -> Answer:
    return Answer(
        completion_text=text,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
    )


def record(number: int, text: str, verdict: Reward) -> dict[str, object]:
    """One line of the output."""
    return {"row": number, "answer": text[:SHOWN_CHARS]} | verdict_fields(verdict)
