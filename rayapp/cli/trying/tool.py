"""Calls tools as one trajectory of the agent loop does. Called by `command.py`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.cli.trying.reward import read_rows
from rayapp.core.aio import run_until_done
from rayapp.core.errors import InputError
from rayapp.core.types import CallRecord
from rayapp.tools.base import ToolContext
from rayapp.tools.calls import RawCall
from rayapp.tools.toolset import ToolSet

MAX_OUTPUT_CHARS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What `rayapp try tool` is asked to do."""

    target: str
    """A tool file, or a class as one names it."""
    data: Path | None
    row: int
    create_kwargs: str
    config: Path | None

    @property
    def is_file(self) -> bool:
        return Path(self.target).suffix in (".yaml", ".yml", ".json")


def try_tool(trial: Trial, words: Sequence[str]) -> bool:
    """Call and print.

    Returns:
        True if every call ran.
    Raises:
        UserError: a tool, the row or the arguments of this command can't be used.
    """
    from rayapp.config.loading import load_config
    from rayapp.sandbox.pool.in_process import open_pool
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
    """`roll '{"sides": 6}'` as a call. Raises InputError: a name without arguments."""
    if len(words) % 2:
        raise InputError(
            f"{words[-1]!r} has no arguments: give each call as a name and a JSON object, e.g. roll '{{}}'"
        )
    for name, arguments in zip(words[::2], words[1::2], strict=True):
        yield RawCall(name=name, arguments=arguments)


async def _play(tools: ToolSet, trial: Trial, calls: Sequence[RawCall]) -> bool:
    from rayapp.rollout.agent.calls import run_call
    from rayapp.rollout.agent.episode import AgentLimits

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


def _kwargs(trial: Trial, tools: ToolSet) -> Mapping[str, Mapping[str, Any]]:
    if trial.create_kwargs:
        try:
            given = json.loads(trial.create_kwargs)
        except ValueError as error:
            raise InputError(f"--create-kwargs is no JSON: {error}") from None
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
