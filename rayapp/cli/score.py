"""`rayapp score` scores completions in files; `rayapp rescore` computes another reward over a run's trajectories.

Both use the code that training scores with. `score` prints one JSON line per completion, in order. It needs no model
and no Ray: the sandbox pool is in this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.cli.arguments import EXIT_FAILED, Overrides
from rayapp.core.errors import InputError
from rayapp.core.files import json_lines
from rayapp.core.logs import visible

if TYPE_CHECKING:
    from rayapp.api.rescoring import Rescored
    from rayapp.core.protocols import Task
    from rayapp.core.types import Reward


app = typer.Typer()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenText:
    """A completion to score."""

    file: str
    line: int
    """Line in a .jsonl file, from 1; 0 if the whole file is the completion."""
    text: str


def verdict_fields(reward: Reward) -> dict[str, object]:
    """Return a verdict's fields for a line of JSON."""
    return {
        "reward": reward.value if reward.valid else None,
        "terms": reward.terms,
        "status": reward.status,
        "valid": reward.valid,
        "failure_kind": reward.failure_kind,
        "detail": reward.detail,
        "seconds": round(reward.time_score_s, 4),
    }


def _how_it_was_read(task: Task, answer: GivenText, reward: Reward) -> str:
    from rayapp.api.scoring import prompt_for
    from rayapp.tasks.coding import CodingTask

    if reward.status != "syntax_error" or not prompt_for(task, answer.text).prefill:
        return ""
    assert isinstance(task, CodingTask)
    return f" (the text has no `def {task.func_name}`, so it was appended to the prompt's {task.answer_prefix!r})"


def read_answers(file: str) -> list[GivenText]:
    """Return the completions of a file: `completion` of each line in .jsonl, else the whole file; `-` reads stdin.

    Raises:
        InputError: the file can't be read, or a line has no completion.
    """
    text = _read(file)
    if Path(file).suffix != ".jsonl":
        return [GivenText(file=file, line=0, text=text)]
    return list(_read_lines(file, text))


def _read_lines(file: str, text: str) -> Iterator[GivenText]:
    for number, record in json_lines(text.split("\n"), file):
        completion = record.get("completion") if isinstance(record, dict) else None
        if not isinstance(completion, str):
            raise InputError(f'{file}, line {number} must be an object like {{"completion": "…"}}')
        yield GivenText(file=file, line=number, text=completion)


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
    seed: Annotated[int, typer.Option(help="Seed that draws the hidden tests")] = 0,
    config: Annotated[Path | None, typer.Option(help="Take the sandbox settings of this config")] = None,
) -> None:
    """Score completions as training would: in the sandbox, one JSON line each. Use this command to check a task of your
    own.

    A text with the function's `def` line is the whole answer; any other text is appended to the task's prefill.
    """
    from rayapp.api.arguments import load
    from rayapp.api.scoring import as_task, score_all

    loaded = as_task(task)
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


SHOWN_CHARS = 60
"""Maximum characters of a task, an answer or a reason in the table."""


@app.command(
    epilog="Examples:\n\n"
    "  rayapp rescore outputs/mine --reward judge:quality --steps 1-10\n\n"
    "  rayapp rescore outputs/mine --reward rewards.py:compute_score --output rescored.parquet\n\n"
    "  rayapp rescore outputs/mine reward.method=flexible --reward verdict --json"
)
def rescore(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or s3://bucket/prefix of one")],
    overrides: Overrides = None,
    reward: Annotated[
        str, typer.Option(help="judge:NAME, file.py:function, or verdict: score with the current tasks and rules")
    ] = "verdict",
    steps: Annotated[str, typer.Option(help="Steps to rescore, e.g. 3 or 1-10; default: all")] = "",
    evaluations: Annotated[
        bool, typer.Option("--eval", help="Rescore evaluation trajectories instead of training ones")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="Take judges and rules from this config, not the run's")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the reward of each trajectory to this parquet file")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
    show: Annotated[int, typer.Option(min=0, help="Number of largest changes to show")] = 10,
) -> None:
    """Compute another reward over a run's trajectories and report what it changes. The run itself is not changed."""
    from rayapp.api.rescoring import rescore

    found = rescore(
        run,
        reward,
        steps=steps_of(steps),
        purpose="eval" if evaluations else "train",
        config=config,
        overrides=overrides or (),
    )
    if output is not None:
        found.write(output)
    if as_json:
        print(json.dumps({"summary": found.summary, "largest": found.largest(show)}))
    else:
        _print_tables(found, reward, show)
    raise typer.Exit(EXIT_FAILED if found.summary["failed"] else 0)


def steps_of(text: str) -> range | None:
    """Parse `3` or `1-10` (both ends included); None for an empty text. Raises InputError for anything else."""
    first, dash, last = text.partition("-")
    if not text:
        return None
    if not first.isdigit() or (dash and not last.isdigit()):
        raise InputError(f"--steps {text!r}: write one step, or a first and a last step, e.g. 3 or 1-10")
    return range(int(first), int(last or first) + 1)


def _print_tables(found: Rescored, reward: str, show: int) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(soft_wrap=True)
    summary = Table("", escape(reward))
    for name, value in found.summary.items():
        summary.add_row(name, f"{value:.6g}")
    console.print(summary)
    if largest := found.largest(show):
        changes = Table("step", "group", "index", "task", "before", "after", "answer", "why")
        for row in largest:
            place = (str(row["step"]), str(row["group_id"]), str(row["index"]))
            task, answer, why = (
                escape(visible(" ".join(row[name].split()))[:SHOWN_CHARS]) for name in ("task", "answer", "detail")
            )
            changes.add_row(*place, task, f"{row['before']:.4g}", f"{row['after']:.4g}", answer, why)
        console.print(changes)
