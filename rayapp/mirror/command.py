"""`rayapp sync`: sends what a run on s3:// has left on this machine, and empties its staging folder when all is."""

from __future__ import annotations

from pathlib import Path

import typer

from rayapp.config_loading import load_config
from rayapp.errors import RunFolderError
from rayapp.mirror.ledger import Ledger
from rayapp.mirror.mirror import mirroring
from rayapp.run_folder import locked


def sync_command(folder: Path) -> None:
    """Finish the uploads of the run that was written in `folder`.

    Raises:
        RunFolderError: it is no staging folder, a run goes on in it, or another machine has gone on with the run.
        StorageError: the storage can't be used; StorageIncompleteError when not all of it could be sent.
    """
    ledger = Ledger.load(folder)
    if ledger is None:
        raise RunFolderError(
            f"{folder} is no staging folder of a run on s3://: it has no .mirror.json. The message of the run names it."
        )
    file = folder / "config.yaml"
    config = load_config(file if file.exists() else None)
    location, _, name = ledger.uri.rpartition("/")
    run = config.run.model_copy(update={"output_dir": location, "name": name})
    config = config.model_copy(update={"run": run})
    with locked(folder / "run.lock"), mirroring(config, folder, only_send=True):
        typer.echo(f"sending what is left in {folder} to {ledger.uri}")
    typer.echo(f"everything is in {ledger.uri}; {folder} was emptied")
