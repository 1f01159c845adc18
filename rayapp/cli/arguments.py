"""Arguments and exit codes that several commands share."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.core.errors import InputError

if TYPE_CHECKING:
    from rayapp.config.config import Config

EXIT_FAILED, EXIT_USER_ERROR, EXIT_BUDGET_SPENT = 1, 2, 3
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/coding_cpu.yaml")]
OptionalConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/coding_cpu.yaml; none: all defaults")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that override the file")]
ModelConfig = Annotated[
    Path | None, typer.Option(help="Use this config.json in place of the model; then no weights are needed")
]


def loaded_config(config: Path | None, overrides: list[str] | None) -> Config:
    """Return the configuration of a command whose CONFIG is optional: its first argument may be an override too."""
    from rayapp.config.loading import load_config

    given = overrides or []
    if config is not None and "=" in config.name and not config.exists():
        return load_config(None, [str(config), *given])
    return load_config(config, given)


def say_at_once(text: str) -> None:
    """Print on a terminal what a command does before it can show anything else: imports take seconds."""
    if sys.stderr.isatty():
        typer.echo(f"{text} …", err=True)


@contextmanager
def with_model_config(config: Config, file: Path | None) -> Iterator[Config]:
    """Yield the config with its model replaced by a folder that holds only this config.json; unchanged for None.

    Raises:
        InputError: there is no such file.
    """
    if file is None:
        yield config
        return
    if not file.is_file():
        raise InputError(f"--model-config {str(file)!r}: there is no such file. Give a model's config.json.")
    from rayapp.config.config import with_values

    with tempfile.TemporaryDirectory(prefix="rayapp-model-") as folder:
        shutil.copyfile(file, Path(folder) / "config.json")
        yield with_values(config, model={"path": folder})
