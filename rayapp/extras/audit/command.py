"""`rayapp task audit`: check whether a task is worth training on before money is spent on GPUs.

The command needs no model and no Ray, because the sandbox pool is in its own process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.core.errors import EXIT_FAILED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rayapp.config.config import Config
    from rayapp.extras.audit.checks import TaskReport

app = typer.Typer(help="Work with tasks.", no_args_is_help=True)
_MOST_LINES = 50  # Tables of more tasks than this show only tasks with findings.


@app.callback()
def _group() -> None:
    """Work with tasks."""


@app.command(
    epilog="Examples:\n\n"
    "  rayapp task audit sort_numbers max_subarray_sum\n\n"
    "  rayapp task audit my_task.yaml --runs 100\n\n"
    "  rayapp task audit data/taco/train.parquet --limit 200 --json > audit.json\n\n"
    "  rayapp task audit 'swe:rows.parquet?mirrors=clones' --kept kept.txt --max-bad-ratio 0.1"
)
def audit(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK", help="Shipped task, .yaml or .py file, data file (.parquet, .jsonl, .json), benchmark:NAME"
        ),
    ],
    runs: Annotated[
        int, typer.Option(min=1, help="Times to score the solution, and times to score an empty answer")
    ] = 20,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows to take from each file or benchmark")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
    kept: Annotated[
        Path | None, typer.Option(help="Write the names of the tasks without findings to this file, one a line")
    ] = None,
    max_bad_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Exit with 0 if at most this share of the tasks has findings")
    ] = 0.0,
    config: Annotated[Path | None, typer.Option(help="Take sandbox and reward settings from this config")] = None,
) -> None:
    """Score the answers that a policy may try (an empty answer, guesses, cheats), and the solution many times. Exits
    with 1 if more tasks have findings than --max-bad-ratio allows.

    A task passes if its solution always earns 1, no other answer earns a reward, and neither the prompt nor the files
    of the workspace contain the solution or the hidden tests."""
    import json
    from dataclasses import asdict

    from rayapp.config.loading import load_config
    from rayapp.core.aio import run_until_done
    from rayapp.core.files import write_text

    reports = run_until_done(_audited(tasks, load_config(config), runs=runs, limit=limit))
    if kept is not None:
        write_text(kept, "".join(f"{report.task}\n" for report in reports if not report.findings))
    if as_json:
        typer.echo(json.dumps([asdict(report) for report in reports], indent=2))
    else:
        _print(reports)
    num_bad = sum(bool(report.findings) for report in reports)
    raise typer.Exit(EXIT_FAILED if num_bad > max_bad_ratio * len(reports) else 0)


async def _audited(tasks: list[str], config: Config, *, runs: int, limit: int | None) -> list[TaskReport]:
    import os

    from rayapp.core.logs import progress_bar
    from rayapp.extras.audit.checks import audit as run_audit
    from rayapp.extras.audit.subjects import subjects_of
    from rayapp.rollout.sources import answer_rewards
    from rayapp.sandbox.pool.build import open_pool

    rewards, cache = answer_rewards(config.reward), config.data.cache_dir
    subjects = await subjects_of(tasks, rewards, cache=cache, limit=limit, sandboxes=config.sandbox)
    with progress_bar() as show:
        show("tasks audited", 0, len(subjects))
        async with open_pool(config.sandbox.without_stock, f"audit-{os.getpid()}") as (sandboxes, _):
            return await run_audit(
                subjects, sandboxes, runs=runs,
                progress=lambda done: show("tasks audited", done, len(subjects)),
            )  # fmt: skip


def _print(reports: Sequence[TaskReport]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rayapp.core.logs import visible

    table = Table("task", "nothing", "solution", "best guess", "cheats", "findings", box=box.SIMPLE)
    for column in table.columns:
        column.overflow = "fold"
    shown = [report for report in reports if report.findings or len(reports) <= _MOST_LINES]
    for report in shown:
        guess = f"{report.trivial:.2f} {report.trivial_answer}" if report.trivial is not None else ""
        nothing = "" if report.nothing is None else f"{report.nothing:g}"
        cells = [report.task, nothing, report.solution, guess, report.cheats, str(len(report.findings))]
        table.add_row(*(escape(visible(cell)) for cell in cells))
    console = Console(soft_wrap=True)
    console.print(table)
    for report in shown:
        for finding in report.findings:
            console.print(
                f"[red]{finding.check:>9}[/]  {escape(visible(f'{report.task}: {finding.detail}'))}", highlight=False
            )
        for what, note in report.notes.items():
            console.print(f"{'note':>9}  {escape(visible(f'{report.task}: {what}: {note}'))}", highlight=False)
    bad = sum(bool(report.findings) for report in reports)
    console.print(f"{len(reports)} tasks audited, {bad} with findings")
