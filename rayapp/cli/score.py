"""`rayapp score`: scores completions in files, by the very code that training scores with.

Prints one JSON line per completion, in order. It needs no model and no Ray: the pool of sandboxes is in this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from rayapp.core.errors import InputError, UserError
from rayapp.core.protocols import SandboxSource, Task
from rayapp.core.types import Prompt, Reward
from rayapp.tasks.coding import CodingTask
from rayapp.tasks.loading import load_task

app = typer.Typer()

_AT_ONCE = 4
"""Completions scored side by side; a sandbox costs little, the order of the lines is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion to score."""

    file: str
    line: int
    """Line of a .jsonl file, from 1; 0 for a file that is one completion."""
    text: str


def score_command(task_source: str, files: Sequence[str], *, seed: int, config_path: Path | None) -> int:
    """Score and print.

    Returns:
        0; 1 when the sandbox failed on at least one of them.
    Raises:
        UserError: the task, a file or the sandbox can't be used.
    """
    from rayapp.config.loading import load_config
    from rayapp.sandbox.pool.in_process import open_pool

    task = load_task(task_source)
    answers = [answer for file in files for answer in read_answers(file)]
    # Without a stock of warm sandboxes, which would cost money and serve nobody.
    sandbox = load_config(config_path).sandbox.model_copy(update={"min_ready": 0})

    async def run() -> bool:
        all_valid = True
        async with open_pool(sandbox, f"score-{os.getpid()}") as (sandboxes, _):
            async for answer, reward in score_answers(task, answers, sandboxes, seed=seed):
                print(json.dumps(as_record(task, answer, reward)), flush=True)
                all_valid &= reward.valid
        return all_valid

    return 0 if asyncio.run(run()) else 1


async def score_answers(
    task: Task, answers: Sequence[Answer], sandboxes: SandboxSource, *, seed: int
) -> AsyncIterator[tuple[Answer, Reward]]:
    """Verdicts in the order of the answers."""
    for start in range(0, len(answers), _AT_ONCE):
        batch = answers[start : start + _AT_ONCE]
        try:
            async with asyncio.TaskGroup() as running:
                verdicts = [
                    running.create_task(task.score(prompt_for(task, answer.text), answer.text, sandboxes, seed=seed))
                    for answer in batch
                ]
        except* UserError as group:
            raise group.exceptions[0] from None
        for answer, verdict in zip(batch, verdicts, strict=True):
            yield answer, verdict.result()


def prompt_for(task: Task, text: str) -> Prompt:
    """The prompt that a text answers. A text with the function's `def` line is whole: it follows no prefill."""
    prompt = Prompt(task=task.name, text="", token_ids=np.zeros(0, np.int32))
    if isinstance(task, CodingTask) and f"def {task.func_name}" not in text:
        return replace(prompt, prefill=task.answer_prefix)
    return prompt


def as_record(task: Task, answer: Answer, reward: Reward) -> dict[str, object]:
    return {
        "file": answer.file,
        "line": answer.line,
        "task": task.name,
        "reward": reward.value if reward.valid else None,
        "terms": reward.terms,
        "status": reward.status,
        "valid": reward.valid,
        "failure_kind": reward.failure_kind,
        "detail": reward.detail + _how_it_was_read(task, answer, reward),
        "seconds": round(reward.time_score_s, 4),
    }


def _how_it_was_read(task: Task, answer: Answer, reward: Reward) -> str:
    if reward.status != "syntax_error" or not prompt_for(task, answer.text).prefill:
        return ""
    assert isinstance(task, CodingTask)
    return (
        f" (the text has no `def {task.func_name}`, so it was read as what follows the prompt's {task.answer_prefix!r})"
    )


def read_answers(file: str) -> list[Answer]:
    """The completions of a file: each line's `completion` in .jsonl, else the whole file; `-` is standard input.

    Raises:
        InputError: the file can't be read, or a line has no completion.
    """
    text = _read(file)
    if Path(file).suffix != ".jsonl":
        return [Answer(file=file, line=0, text=text)]
    return list(_read_lines(file, text))


def _read_lines(file: str, text: str) -> Iterator[Answer]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{file}, line {number} is no JSON: {error}") from error
        completion = record.get("completion") if isinstance(record, dict) else None
        if not isinstance(completion, str):
            raise InputError(f'{file}, line {number}: an object like {{"completion": "…"}} was expected')
        yield Answer(file=file, line=number, text=completion)


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"completions {file} can't be read: {error}") from error


@app.command(
    epilog="Examples:\n\n"
    "  rayapp score sort_numbers answer.py\n\n"
    '  rayapp score my_task.yaml completions.jsonl --seed 7     (a line each: {"completion": "…"})\n\n'
    "  cat answer.txt | rayapp score max_subarray_sum -"
)
def score(
    task: Annotated[str, typer.Argument(help="Name of a shipped task, or a .yaml or .py file")],
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Completions: .txt, .py, .jsonl, or - for stdin")],
    seed: Annotated[int, typer.Option(help="Draws the hidden tests")] = 0,
    config: Annotated[Path | None, typer.Option(help="Take the sandbox settings of this config")] = None,
) -> None:
    """Score completions as training would: in the sandbox, one JSON line each. Use it to check a task of your own.

    A text with the function's `def` line is taken as the whole answer, any other as what follows the task's prefill.
    """

    raise typer.Exit(score_command(task, files, seed=seed, config_path=config))
