"""Arguments, exit codes, files of completions and fields of verdicts that several commands share."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.core.errors import InputError

if TYPE_CHECKING:
    from rayapp.config.config import Config
    from rayapp.core.types import Reward

SILENCE_S = 10.0
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
    """Yield the config with its model replaced by a folder that holds only this config.json; unchanged for None."""
    if file is None:
        yield config
        return
    if not file.is_file():
        raise InputError(f"--model-config {str(file)!r}: there is no such file. Give a model's config.json.")
    from rayapp.config.config import with_values

    with tempfile.TemporaryDirectory(prefix="rayapp-model-") as folder:
        shutil.copyfile(file, Path(folder) / "config.json")
        yield with_values(config, model={"path": folder})


@contextmanager
def told_while_silent() -> Iterator[None]:
    """Print on a terminal, every ten seconds of the block, which of rayapp's functions is running."""
    caller, began_s, is_over = threading.get_ident(), time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_over.wait(SILENCE_S):
            frame = sys._current_frames().get(caller)  # noqa: SLF001 - the only way to see another thread
            while frame is not None and not frame.f_globals.get("__name__", "").startswith("rayapp."):
                frame = frame.f_back
            place = f" in {frame.f_globals['__name__']}, {frame.f_code.co_name}" if frame is not None else ""
            say_at_once(f"{time.monotonic() - began_s:.0f} s{place}")

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenText:
    file: str
    line: int  # in a .jsonl file, from 1; 0 if the whole file is the completion
    text: str


def verdict_fields(reward: Reward) -> dict[str, object]:
    """Return a verdict's fields for a line of JSON."""
    return {
        "reward": reward.value if reward.valid else None,
        "terms": reward.terms,
        "status": reward.status,
        "valid": reward.valid,
        "failure_kind": reward.failure_kind,
        "detail": reward.detail,
        "seconds": round(reward.time_score_s, 4),
    }


def read_answers(file: str) -> list[GivenText]:
    """Return the completions of a file: `completion` of each line in .jsonl, else the whole file; `-` reads stdin."""
    text = _read(file)
    if Path(file).suffix != ".jsonl":
        return [GivenText(file=file, line=0, text=text)]
    return list(_read_lines(file, text))


def _read_lines(file: str, text: str) -> Iterator[GivenText]:
    from rayapp.core.files import json_lines  # loads asyncio, which `rayapp --help` does without

    for number, record in json_lines(text.split("\n"), file):
        completion = record.get("completion") if isinstance(record, dict) else None
        if not isinstance(completion, str):
            raise InputError(f'{file}, line {number} must be an object like {{"completion": "…"}}')
        yield GivenText(file=file, line=number, text=completion)


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"completions {file} can't be read: {error}") from error
