"""`rayapp rescore`: another reward over a run's trajectories, and what it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.cli.arguments import EXIT_FAILED, Overrides
from rayapp.core.errors import InputError
from rayapp.core.terminal import visible

if TYPE_CHECKING:
    from rayapp.api.rescoring import Rescored

app = typer.Typer()
SHOWN_CHARS = 60
"""Characters of a task, an answer and a reason that a row of the table shows."""


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
        str, typer.Option(help="judge:NAME, file.py:function, or verdict: what tasks and rules say now")
    ] = "verdict",
    steps: Annotated[str, typer.Option(help="Of these steps alone, e.g. 3 or 1-10")] = "",
    evaluations: Annotated[
        bool, typer.Option("--eval", help="What evaluations sampled, not what was trained on")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="Take judges and rules of this config, not the run's")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the reward of each trajectory to this parquet file")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object")] = False,
    show: Annotated[int, typer.Option(min=0, help="So many of the largest changes")] = 10,
) -> None:
    """Compute another reward over what a run has sampled, and say what it changes. The run stays as it is."""
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
    """`3` or `1-10`, both ends included; None for an empty text. Raises InputError: it is neither."""
    first, dash, last = text.partition("-")
    if not text:
        return None
    if not first.isdigit() or (dash and not last.isdigit()):
        raise InputError(f"--steps {text!r}: write a step or two with a dash, e.g. 3 or 1-10")
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
