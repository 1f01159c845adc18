"""`rayapp config show` prints a configuration with all defaults; `rayapp config import-verl` translates one of verl."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.cli.arguments import OptionalConfigFile, Overrides, loaded_config
from rayapp.core.errors import ConfigError

if TYPE_CHECKING:
    from rayapp.config.config import Config
    from rayapp.config.verl.importing import Imported


app = typer.Typer(help="Look at configurations.", no_args_is_help=True)


@app.command(
    name="show",
    epilog="Examples:\n\n"
    "  rayapp config show configs/coding_cpu.yaml\n\n"
    "  rayapp config show configs/coding_cpu.yaml rollout.group_size=8",
)
def config_show(config: OptionalConfigFile = None, overrides: Overrides = None) -> None:
    """Print the configuration with every default filled in, after checking it."""
    from rayapp.config.loading import to_yaml

    typer.echo(to_yaml(loaded_config(config, overrides)), nl=False)


_WIDTH_OF_FILES = 200
EPILOG = (
    "Examples:\n\n"
    "  rayapp config import-verl algorithm.adv_estimator=grpo data.train_files=train.parquet ... > my_run.yaml\n\n"
    "  rayapp config import-verl gsm8k_multiturn_grpo.yaml data.train_batch_size=16 > my_run.yaml\n\n"
    "  rayapp config import-verl run_qwen3_8b.sh trainer.nnodes=2 > my_run.yaml\n\n"
    "  rayapp config import-verl verl.yaml trainer.nnodes=2 rayapp.cluster.device=gpu"
)


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

    A launch script is parsed, never run. Without FILE, the overrides apply to verl's defaults.
    """
    typer.echo(imported(file, overrides or []).to_yaml(), nl=False)


def imported(file: Path | None, overrides: list[str]) -> Imported:
    """Import a verl configuration and print what became of each key. `file` may also be the first override."""
    from rayapp.config.verl.importing import import_verl

    if file is not None and "=" in str(file) and not file.is_file():
        file, overrides = None, [str(file), *overrides]
    found = import_verl(file, overrides)
    print_table(found)
    return found


def runnable(file: Path | None, overrides: list[str]) -> Config:
    """Import verl's configuration for a run that starts now.

    Raises:
        ConfigError: the number of steps can't be counted.
    """
    found = imported(file, overrides)
    if found.uncounted:
        raise ConfigError(
            f"trainer.total_training_steps is not set, and {found.uncounted}. Set trainer.total_training_steps."
        )
    return found.config


def print_table(imported: Imported) -> None:
    """Print to stderr, for each key of verl, the setting that it became, or why it has no effect. Stdout is for the
    config."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=_WIDTH_OF_FILES)
    table = Table("verl", "here", "note", title="What becomes of each key")
    for row in imported.rows:
        said = "verl's default; " if row.is_default else ""
        note = (said + row.landing.note).removesuffix("; ")
        table.add_row(escape(f"{row.key} = {row.value}"), escape(row.where) or "[dim]no effect[/dim]", escape(note))
    console.print(table)
