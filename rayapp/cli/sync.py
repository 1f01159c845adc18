"""`rayapp sync`: sends what a run on s3:// has left on this machine, and empties its staging folder when all is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rayapp.core.errors import RunFolderError
from rayapp.core.files import locked

app = typer.Typer()


@app.command(epilog="Examples:\n\n  rayapp sync ~/.cache/rayapp/runs/coding_8gpu-3f1c0a9b2d4e")
def sync(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Staging folder, as the run's message names it")],
) -> None:
    """Finish the uploads of a run on s3:// that ended, or was ended, before all of it was there."""
    from rayapp.config.config import with_values
    from rayapp.config.loading import load_config
    from rayapp.runs.mirror.ledger import Ledger
    from rayapp.runs.mirror.mirror import mirroring

    folder = folder.expanduser()
    ledger = Ledger.load(folder)
    if ledger is None:
        raise RunFolderError(
            f"{folder} is no staging folder of a run on s3://: it has no .mirror.json. The message of the run names it."
        )
    file = folder / "config.yaml"
    config = load_config(file if file.exists() else None)
    location, _, name = ledger.uri.rpartition("/")
    config = with_values(config, run={"output_dir": location, "name": name})
    with locked(folder / "run.lock"), mirroring(config, folder, only_send=True):
        typer.echo(f"sending what is left in {folder} to {ledger.uri}")
    typer.echo(f"everything is in {ledger.uri}; {folder} was emptied")
