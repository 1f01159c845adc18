"""Functions of `rayapp try`: score answers with a reward function or a rule, and call tools as a trajectory does."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.cli.arguments import read_answers, verdict_fields
from rayapp.config.config import Config, with_values
from rayapp.core.aio import run_until_done
from rayapp.core.errors import InputError, one_line
from rayapp.core.types import CallRecord, Reward
from rayapp.tasks.answer_rules import find_rule
from rayapp.tasks.answers import Answer, score_answer
from rayapp.tasks.data.data_row import DataRow, parse_row
from rayapp.tools.base import RawCall, ToolContext
from rayapp.tools.toolset import ToolSet

SHOWN_CHARS = 200
_ASSERT = re.compile(r"""^[\s\["']*assert\b""", re.MULTILINE)
"""A line of Python's tests, also within a JSON list of tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    name: str  # FILE.py:NAME, package.module:NAME, or a data source that has a rule
    data: Path | None
    rows: range
    ground_truth: str
    seed: int
    config: Path | None

    @property
    def has_function(self) -> bool:
        return ":" in self.name


def try_reward(trial: Trial, texts: Sequence[str], files: Sequence[str]) -> bool:
    """Score the answers, or the ground truth and an empty text of each row, and print one JSON line each. Return True
    if every answer has a verdict, each row's ground truth earns more than an empty text, and a right answer was tried.
    """
    from rayapp.config.loading import load_config
    from rayapp.rollout.sources import answer_rewards
    from rayapp.sandbox.pool.build import open_pool

    config = with_function(load_config(trial.config), trial)
    rewards = answer_rewards(config.reward)
    if rewards.custom is not None:
        rewards.custom.load()
    answers = [*texts, *(found.text for file in files for found in read_answers(file))]
    given = list(rows_of(trial))
    for _, row in given:
        rewards.truth_kind(row.data_source)

    async def run() -> bool:
        is_well, untried = True, 0
        async with open_pool(config.sandbox.without_stock, f"try-{os.getpid()}") as (pool, _):
            for number, row in given:
                verdicts = []
                for text in answers or _extremes(row, trial):
                    verdicts.append(await score_answer(Answer.of(row, text), rewards, pool, seed=trial.seed))
                    print(json.dumps(record(number, text, verdicts[-1])), flush=True)
                told = "" if answers else worthless_truth(number, row, trial, [each.value for each in verdicts])
                if told:
                    print(told, file=sys.stderr)
                is_well &= all(verdict.valid for verdict in verdicts) and not told
                untried += not (answers or has_right_answer(row, trial))
        if untried:
            print(
                f"{'failed' if untried == len(given) else 'note'}: no right answer was tried on {untried} of "
                f"{len(given)} rows: their ground truth is not an answer (tests, a struct or empty). Give one with "
                "--answer, or a file of answers",
                file=sys.stderr,
            )
        return is_well and untried < len(given)

    return run_until_done(run())


def with_function(config: Config, trial: Trial) -> Config:
    """Return the config with the tried function as reward.custom; empty for a rule."""
    return with_values(config, reward={"custom": trial.name if trial.has_function else ""})


def rows_of(trial: Trial) -> Iterator[tuple[int, DataRow]]:
    """Yield the rows that answers are scored for, each with its number in the file."""
    if trial.data is None:
        source = "own" if trial.has_function else trial.name
        yield 0, DataRow(messages=(), data_source=source, ground_truth=trial.ground_truth)
        return
    yield from read_rows(trial.data, trial.rows)


def read_rows(file: Path, rows: range) -> Iterator[tuple[int, DataRow]]:
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
        raise InputError(f"{file} can't be read: {one_line(error)}") from None


def _extremes(row: DataRow, trial: Trial) -> list[str]:
    """Return the right answer, in the rule's form if the prompt asks for it, and an empty text."""
    truth, rule = row.ground_truth, None if trial.has_function else find_rule(row.data_source)
    if rule is not None and rule.is_asked_for(_prompt(row)):
        return [rule.right_answer(truth), ""]
    return [truth if isinstance(truth, str) else json.dumps(truth, default=str), ""]


def has_right_answer(row: DataRow, trial: Trial) -> bool:
    """Return True if the row's ground truth is an answer. A reward function may score tests or a struct 0."""
    truth = row.ground_truth
    if not trial.has_function:
        return find_rule(row.data_source) is not None and truth != ""
    return isinstance(truth, str | int | float) and truth != "" and not _ASSERT.search(str(truth))


def worthless_truth(number: int, row: DataRow, trial: Trial, rewards: Sequence[float]) -> str:
    """Return why this row is useless for training; empty if its ground truth earns more than an empty answer."""
    rule = None if trial.has_function else find_rule(row.data_source)
    if not has_right_answer(row, trial) or rewards[0] > rewards[1]:
        return ""
    head = (
        f"failed: row {number}: the ground truth {row.ground_truth!r:.60} earns {rewards[0]:g}, not more than an empty "
        "answer."
    )
    if rule is None:
        return f"{head} If {trial.name} reads another form of answer, give a right answer with --answer."
    shown = rule.right_answer(row.ground_truth)[:80]
    if rule.is_asked_for(_prompt(row)):
        return f"{head} The rule of {row.data_source} can't read {shown!r}: check the ground truth."
    return (
        f"{head} The rule of {row.data_source} reads answers like {shown!r}, and the prompt doesn't ask for this form: "
        "add it to the prompt (rayapp data rows --system '…'), or give an answer as the policy would write it with "
        "--answer."
    )


def _prompt(row: DataRow) -> str:
    return "\n".join(str(message.get("content", "")) for message in row.messages)


def record(number: int, text: str, verdict: Reward) -> dict[str, object]:
    return {"row": number, "answer": text[:SHOWN_CHARS]} | verdict_fields(verdict)


MAX_OUTPUT_CHARS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTrial:
    target: str  # a tool file, `FILE.py:CLASS`, or a shipped tool's name
    data: Path | None
    row: int
    create_kwargs: str
    config: Path | None

    @property
    def is_file(self) -> bool:
        return Path(self.target).suffix in (".yaml", ".yml", ".json")


def try_tool(trial: ToolTrial, words: Sequence[str]) -> bool:
    """Call the tools in order and print one JSON line per call. Return True if every call ran."""
    from rayapp.config.loading import load_config
    from rayapp.sandbox.pool.build import open_pool
    from rayapp.tools.loading import open_tools

    calls = list(calls_of(words))
    sandbox = load_config(trial.config).sandbox.without_stock

    async def run() -> bool:
        async with open_pool(sandbox, f"try-{os.getpid()}") as (pool, _):
            file, brought = (trial.target, ()) if trial.is_file else ("", (trial.target,))
            tools = await open_tools(file, ToolContext(sandboxes=pool), brought=brought)
            try:
                return await _play(tools, trial, calls)
            finally:
                await tools.close()

    return run_until_done(run())


def calls_of(words: Sequence[str]) -> Iterator[RawCall]:
    """Parse words such as `roll '{"sides": 6}'` into calls."""
    if len(words) % 2:
        raise InputError(
            f"{words[-1]!r} has no arguments: give each call as a name and a JSON object, e.g. roll '{{}}'"
        )
    for name, arguments in zip(words[::2], words[1::2], strict=True):
        yield RawCall(name=name, arguments=arguments)


async def _play(tools: ToolSet, trial: ToolTrial, calls: Sequence[RawCall]) -> bool:
    from rayapp.rollout.agent.calls import run_call
    from rayapp.rollout.recorder import AgentLimits

    if not calls:
        for schema in tools.schemas:
            print(json.dumps(schema.as_openai()))
        return True
    limits = AgentLimits(max_response_tokens=1, max_tool_output_chars=MAX_OUTPUT_CHARS)
    records: list[CallRecord] = []
    async with tools.trajectory(_kwargs(trial, tools)) as states:
        for call in calls:
            records.append(await run_call(call, tools=tools, states=states, limits=limits))
            print(json.dumps(_shown(records[-1])), flush=True)
        end = {"verdicts": await states.rewards(), "answer": states.answer}
    print(json.dumps(end))
    return not any(record.failure for record in records)


def _kwargs(trial: ToolTrial, tools: ToolSet) -> Mapping[str, Mapping[str, Any]]:
    if trial.create_kwargs:
        try:
            given = json.loads(trial.create_kwargs)
        except ValueError as error:
            raise InputError(f"--create-kwargs is not JSON: {error}") from None
        return {schema.name: {"create_kwargs": given} for schema in tools.schemas}
    if trial.data is None:
        return {}
    [(_, row)] = read_rows(trial.data, range(trial.row, trial.row + 1))
    return row.tools_kwargs


def _shown(record: CallRecord) -> dict[str, object]:
    return {
        "tool": record.name,
        "arguments": record.arguments,
        "output": record.output,
        "failure": record.failure,
        "reward": record.reward,
        "seconds": round(record.duration_s, 4),
        "waited_s": round(record.waited_s, 4),
    }
