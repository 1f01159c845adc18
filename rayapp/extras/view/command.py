"""`rayapp view` serves runs to a browser until Ctrl-C, or prints a table of them."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.core.errors import InputError, UserError
from rayapp.core.http import listen
from rayapp.core.logs import visible
from rayapp.extras.view.security import is_loopback

if TYPE_CHECKING:
    from rayapp.extras.view.run import ViewedRun

app = typer.Typer()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address. Raises InputError."""
    try:
        return listen(host, port, backlog=128)
    except OSError as error:
        raise InputError(
            f"--host {host} --port {port}: {error.strerror or error}. Give another --port, or --port 0 for any free one"
        ) from None


def address(host: str, port: int, token: str) -> str:
    """Return the URL for a browser. A wildcard host becomes this machine's name, which other machines can reach."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")


@app.command(
    epilog="Examples:\n\n"
    "  rayapp view outputs/coding_cpu\n\n"
    "  rayapp view outputs/seed0 outputs/seed1 --port 8090\n\n"
    "  rayapp view outputs                                         (every run in it)\n\n"
    "  rayapp view outputs --list                                  (a table of them, without a browser)\n\n"
    "  rayapp view s3://bucket/runs/coding_8gpu --host 0.0.0.0     (asks for the token in the address it prints)"
)
def view(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Run folders, folders of runs, or s3://bucket/prefix of a run")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; any address but loopback requires a token")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port")] = 8088,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder; default: the run's own")] = None,
    token: Annotated[bool, typer.Option("--token", help="Require a token on loopback too")] = False,
    list_them: Annotated[
        bool, typer.Option("--list", help="Print state, step, last reward, solved share and cost so far, and end")
    ] = False,
) -> None:
    """Show runs in a browser: curves, groups, completions, tokens. Only reads, also from runs that are in progress."""
    try:
        import uvicorn

        from rayapp.extras.view.run import ViewedRun
        from rayapp.extras.view.server import make_app
        from rayapp.runs.source import open_source, run_uris
    except ModuleNotFoundError as error:
        raise UserError(
            f"rayapp view needs the package {error.name}: make venv, or pip install '.[view]' in a clone"
        ) from None
    shown = [ViewedRun(open_source(run), tokenizer) for uri in runs for run in run_uris(uri)]
    if list_them:
        for line in _table([_row(run) for run in shown]):
            typer.echo(visible(line))
        return
    if tokenizer is not None:
        shown[0].tokenizer()  # report a wrong path now, not when a trajectory is opened
    secret = secrets.token_urlsafe(24) if token or not is_loopback(host) else ""
    with bind(host, port) as listening:
        actual_port = listening.getsockname()[1]
        typer.echo(f"{', '.join(run.name for run in shown)}: {address(host, actual_port, secret)}    (Ctrl-C ends it)")
        settings = uvicorn.Config(
            make_app(shown, token=secret),
            ws="none",
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(settings).run(sockets=[listening])


def _row(run: ViewedRun) -> tuple[str, ...]:
    """Return the cells of a run's line; `-` for an unknown value."""
    said = run.summary()
    last = said["last"] or {}
    shown = (f"{last[key]:.3g}" if key in last else "-" for key in ("reward/mean", "reward/solved/mean", "cost/total"))
    steps = f"{last.get('step', 0)}/{said['num_steps'] or '?'}"
    return (run.name, said["state"], steps, *shown)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    everything = [("run", "state", "step", "reward", "solved", "cost"), *rows]
    widths = [max(map(len, column)) for column in zip(*everything, strict=True)]
    for row in everything:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
