"""`rayapp view` serves runs to a browser until Ctrl-C; `rayapp report` writes a run's report to a folder; `rayapp list`
and `rayapp compare` print tables of runs.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rayapp.core.errors import InputError, UserError
from rayapp.core.http import listen
from rayapp.core.logs import visible
from rayapp.runs.view.security import is_loopback

app = typer.Typer()


@contextmanager
def explaining_missing_packages(command: str) -> Iterator[None]:
    """Turn a failed import in the block into a UserError that names the way out."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(
            f"{command} needs the package {error.name}: make venv, or pip install '.[view]' in a clone"
        ) from None


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address. Raises: InputError: the port is taken or needs other rights, or the
    host is not this machine.
    """
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
) -> None:
    """Show runs in a browser: curves, groups, completions, tokens. Only reads, also from runs that are in progress."""
    with explaining_missing_packages("rayapp view"):
        import uvicorn

        from rayapp.runs.view.run import ViewedRun
        from rayapp.runs.view.server import make_app
        from rayapp.runs.view.source import open_source, run_uris
    shown = [ViewedRun(open_source(run), tokenizer) for uri in runs for run in run_uris(uri)]
    for run in shown:
        run.refresh()  # so that the first page has rows immediately; the rest loads in the background
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


@app.command(
    epilog="Examples:\n\n"
    "  rayapp report outputs/coding_cpu\n\n"
    "  rayapp report s3://bucket/runs/coding_8gpu --out report"
)
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or s3://bucket/prefix of one")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default RUN/report")] = None,
) -> None:
    """Write a report of a run: one self-contained HTML file and a PNG of each chart."""
    with explaining_missing_packages("rayapp report"):
        from rayapp.runs.view.report import write_report
    written = write_report(run, out)
    typer.echo(f"{written.page}\n{len(written.plots)} plots beside it")


@app.command(name="list", epilog="Examples:\n\n  rayapp list\n\n  rayapp list outputs s3://bucket/runs/coding_8gpu")
def list_runs(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Run folders, folders of runs, or s3://bucket/prefix")
    ] = None,
) -> None:
    """List runs, last written first: state, step, last reward and solved share, and cost so far."""
    with explaining_missing_packages("rayapp list"):
        from rayapp.runs.compare import COLUMNS, existing_runs, list_rows, table
        from rayapp.runs.view.source import run_uris
    found = existing_runs([run for uri in runs or ["outputs"] for run in run_uris(uri)])
    for line in table(COLUMNS, list(list_rows(found))):
        typer.echo(visible(line))


@app.command(
    epilog="Examples:\n\n"
    "  rayapp compare outputs/lr1e-6 outputs/lr3e-6\n\n"
    "  rayapp compare outputs/a_seed0 outputs/a_seed1 outputs/b_seed0 outputs/b_seed1 --out comparison"
)
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN", help="Run folders, folders of runs, or s3://bucket/prefix")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for comparison.html, with the curves side by side")] = None,
) -> None:
    """Compare runs: key numbers, configuration keys that differ, and curves. Runs that differ only in their seed are
    one column, with the spread over seeds."""
    with explaining_missing_packages("rayapp compare"):
        from rayapp.runs.compare import comparison_lines, existing_runs, sets_of, write_comparison
        from rayapp.runs.view.source import run_uris
    sets = sets_of(existing_runs([run for uri in runs for run in run_uris(uri)]))
    for line in comparison_lines(sets):
        typer.echo(visible(line))
    if out is not None:
        typer.echo(f"\n{write_comparison(sets, out)}")
