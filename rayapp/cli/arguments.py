"""Arguments and exit codes that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXIT_FAILED, EXIT_USER_ERROR = 1, 2


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/coding_cpu.yaml")]


OptionalConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/coding_cpu.yaml; none: all defaults")
]


Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that win over the file")]
