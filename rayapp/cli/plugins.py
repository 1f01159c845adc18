"""`rayapp plugins`: what installed packages offer, whether it loads, and whether it keeps what its kind promises."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rayapp.cli.arguments import EXIT_FAILED

app = typer.Typer()


@app.command(epilog="Examples:\n\n  rayapp plugins\n\n  rayapp plugins reverse --check")
def plugins(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="These alone; none: all")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the contract of each one's kind (rayapp.testing.plugins)")
    ] = False,
) -> None:
    """List plug-ins as JSON lines: tasks, agents, rewards, tools, sandbox providers, trackers, losses, estimators.

    Exits with 1 if one of them is broken. A broken one stops no run but those that ask for it.
    """
    from rayapp.core.errors import RayappError
    from rayapp.core.names.plugins import plugins as installed

    is_well = True
    for found in installed():
        if names and found.name not in names:
            continue
        line = {"kind": found.kind, "name": found.name, "package": found.package, "place": found.place}
        try:
            if check:
                from rayapp.testing.plugins import check_plugin

                check_plugin(found)
            else:
                found.load()
        except (RayappError, AssertionError) as error:
            line["problem"], is_well = str(error), False
        typer.echo(json.dumps(line))
    if not is_well:
        raise typer.Exit(EXIT_FAILED)
