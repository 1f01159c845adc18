"""Arguments and exit codes that several commands share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rayapp.config.config import Config, with_values
from rayapp.core.errors import InputError

EXIT_FAILED, EXIT_USER_ERROR = 1, 2
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/coding_cpu.yaml")]
OptionalConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/coding_cpu.yaml; none: all defaults")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that win over the file")]
ModelConfig = Annotated[
    Path | None, typer.Option(help="A model's config.json, where its weights are not at hand: for this command only")
]


@contextmanager
def with_model_config(config: Config, file: Path | None) -> Iterator[Config]:
    """The config with a model of which only this config.json is there.

    Raises:
        InputError: there is no such file.
    """
    if file is None:
        yield config
        return
    if not file.is_file():
        raise InputError(f"--model-config {str(file)!r}: there is no such file. Give a model's config.json.")
    with tempfile.TemporaryDirectory(prefix="rayapp-model-") as folder:
        shutil.copyfile(file, Path(folder) / "config.json")
        yield with_values(config, model={"path": folder})
