"""`rayapp score` scores completions of a task, or answers to a reward, with the code that training scores with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.cli.arguments import GivenText, read_answers, verdict_fields
from rayapp.core.errors import EXIT_FAILED, InputError

if TYPE_CHECKING:
    from rayapp.core.protocols import Task
    from rayapp.core.types import Reward


app = typer.Typer()


def _how_it_was_read(task: Task, answer: GivenText, reward: Reward) -> str:
    from rayapp.api.scoring import prompt_for
    from rayapp.tasks.coding import CodingTask

    if reward.status != "syntax_error" or not prompt_for(task, answer.text).prefill:
        return ""
    assert isinstance(task, CodingTask)
    return f" (the text has no `def {task.func_name}`, so it was appended to the prompt's {task.answer_prefix!r})"


@app.command(
    epilog="Examples:\n\n"
    "  rayapp score sort_numbers answer.py\n\n"
    '  rayapp score my_task.yaml completions.jsonl --seed 7     (a line each: {"completion": "…"})\n\n'
    "  cat answer.txt | rayapp score max_subarray_sum -\n\n"
    "  rayapp score rewards.py:compute_score --data data/mine/train.parquet      (a reward, on its first rows)\n\n"
    "  rayapp score rewards.py:compute_score --ground-truth 4 --answer 'It is 4' --answer 5\n\n"
    "  rayapp score openai/gsm8k --ground-truth 72 answers.jsonl                 (a rule that ships)"
)
def score(
    name: Annotated[
        str,
        typer.Argument(metavar="TASK|REWARD", help="Task (shipped, .yaml, .py), FILE.py:FUNCTION, or a rule of rows"),
    ],
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Answers: .txt, .py, .jsonl, or - for stdin")
    ] = None,
    data: Annotated[Path | None, typer.Option(metavar="FILE", help="A reward's parquet file with rows")] = None,
    row: Annotated[int | None, typer.Option(min=0, help="Score only this row of --data, counted from 0")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Score this many rows of --data, from the first")] = 3,
    ground_truth: Annotated[str, typer.Option(help="Without --data: the ground truth to compare answers with")] = "",
    answer: Annotated[list[str] | None, typer.Option(help="An answer to a reward; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="Seed that draws the hidden tests")] = 0,
    config: Annotated[Path | None, typer.Option(help="Take sandbox and reward settings from this config")] = None,
) -> None:
    """Score completions as training would: in the sandbox, one JSON line each. Use this command to check a task or a
    reward of your own.

    Of a task's answers, a text with the function's `def` line is the whole answer; any other text is appended to the
    task's prefill. A reward without answers scores the ground truth itself and an empty text: the ground truth should
    earn more.
    """
    if data is not None or ground_truth or answer or ":" in name:
        from rayapp.cli.trial import Trial, try_reward

        given = range(row, row + 1) if row is not None else range(rows)
        trial = Trial(name=name, data=data, rows=given, ground_truth=ground_truth, seed=seed, config=config)
        raise typer.Exit(0 if try_reward(trial, answer or [], files or []) else EXIT_FAILED)
    if not files:
        raise InputError(f"no answers to {name}: name their files, or - for stdin")
    _score_task(name, files, seed, config)


def _score_task(name: str, files: list[str], seed: int, config: Path | None) -> None:
    from rayapp.api.arguments import load
    from rayapp.api.scoring import as_task, score_all

    loaded = as_task(name)
    answers = [answer for file in files for answer in read_answers(file)]
    valid: list[bool] = []

    def tell(place: int, reward: Reward) -> None:
        answer = answers[place]
        found = {"file": answer.file, "line": answer.line, "task": loaded.name} | verdict_fields(reward)
        detail = {"detail": reward.detail + _how_it_was_read(loaded, answer, reward)}
        print(json.dumps(found | detail), flush=True)
        valid.append(reward.valid)

    score_all(loaded, [answer.text for answer in answers], load(config).sandbox, seed=seed, tell=tell)
    raise typer.Exit(0 if all(valid) else EXIT_FAILED)
