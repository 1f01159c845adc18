"""`rayapp config import-verl`: what a verl configuration means here. Wired into `rayapp.cli.main`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rayapp.config.verl.importing import Imported

app = typer.Typer()

_WIDTH_OF_FILES = 200
EPILOG = (
    "Examples:\n\n"
    "  rayapp config import-verl gsm8k_multiturn_grpo.yaml data.train_batch_size=16 > my_run.yaml\n\n"
    "  rayapp config import-verl verl.yaml trainer.nnodes=2 rayapp.cluster.device=gpu"
)


@app.command(name="import-verl", epilog=EPILOG)
def import_verl_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The YAML that verl's --config-name names")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="verl's overrides; rayapp.KEY=VALUE sets a key of ours"),
    ] = None,
) -> None:
    """Print a verl configuration as one of ours, and to stderr what became of each key. Unknown keys are an error."""
    from rayapp.config.verl.importing import import_verl

    imported = import_verl(file, overrides or ())
    print_table(imported)
    typer.echo(imported.to_yaml(), nl=False)


def print_table(imported: Imported) -> None:
    """Each key, where it went, and why it has no effect or differs. Goes to stderr: stdout is the config."""
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
