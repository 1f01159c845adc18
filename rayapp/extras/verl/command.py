"""`rayapp config import-verl` and `rayapp train --verl`: import verl's configuration and print
what became of each key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError
from rayapp.extras.verl.importing import Imported, import_verl

_WIDTH_OF_FILES = 200


EPILOG = (
    "Examples:\n\n"
    "  rayapp config import-verl algorithm.adv_estimator=grpo data.train_files=train.parquet ... > my_run.yaml\n\n"
    "  rayapp config import-verl gsm8k_multiturn_grpo.yaml data.train_batch_size=16 > my_run.yaml\n\n"
    "  rayapp config import-verl run_qwen3_8b.sh trainer.nnodes=2 > my_run.yaml\n\n"
    "  rayapp config import-verl verl.yaml trainer.nnodes=2 rayapp.cluster.device=gpu"
)


app = typer.Typer()


@app.command(name="import-verl", epilog=EPILOG)
def import_verl_command(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Launch script, or the YAML file of --config-name")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="verl's overrides; rayapp.KEY=VALUE sets a key of rayapp"),
    ] = None,
) -> None:
    """Print a verl configuration as a rayapp config; a table on stderr shows what became of each key. Unknown keys are
    errors.

    A launch script runs in a sandbox, where nothing trains. Without FILE, the overrides apply to verl's defaults.
    """
    typer.echo(imported(file, overrides or []).to_yaml(), nl=False)


def imported(file: Path | None, overrides: list[str]) -> Imported:
    """Import a verl configuration and print what became of each key. `file` may be the first override."""
    if file is not None and "=" in str(file) and not file.is_file():
        file, overrides = None, [str(file), *overrides]
    found = import_verl(file, overrides)
    print_table(found)
    return found


def runnable(file: Path | None, overrides: list[str]) -> Config:
    """Import verl's configuration for a run that starts now. Raises ConfigError: the steps can't be counted."""
    found = imported(file, overrides)
    if found.uncounted:
        raise ConfigError(
            f"trainer.total_training_steps is not set, and {found.uncounted}. Set trainer.total_training_steps."
        )
    return found.config


def print_table(imported: Imported) -> None:
    """Print to stderr what became of verl's keys: those that set something, those folded into others, those ignored."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=_WIDTH_OF_FILES)
    table, width = Table("verl", "here", "note", title="What becomes of each key"), console.width // 3
    for row in sorted(imported.rows, key=lambda row: row.rank):
        said = "verl's default; " if row.is_default else ""
        given = shortened(f"{row.key} = {row.value}", width)
        table.add_row(
            escape(given), escape(shortened(row.outcome, width)), escape((said + row.landing.note).removesuffix("; "))
        )
    console.print(table)


def shortened(text: str, width: int) -> str:
    """Return a key with its value in at most `width` characters, without its middle: the ends tell keys apart."""
    head = width // 4
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - width + head + 1 :]}"
