"""`rayapp view` and `rayapp report` as the CLI calls them: opens runs, picks an address, serves until Ctrl-C."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from rayapp.errors import InputError, UserError
from rayapp.view.security import is_loopback


def view_command(uris: Sequence[str], *, host: str, port: int, tokenizer: Path | None, token: bool) -> None:
    """Serve the runs until interrupted.

    Raises:
        InputError: no such run, or the port is taken.
        UserError: a package of the page is missing.
    """
    with explaining_missing_packages("rayapp view"):
        import uvicorn

        from rayapp.view.run import ViewedRun
        from rayapp.view.server import make_app
        from rayapp.view.source import open_source
    runs = [ViewedRun(open_source(uri), tokenizer) for uri in uris]
    for run in runs:
        run.refresh()  # the first page has rows at once; the rest comes while people look
    if tokenizer is not None:
        runs[0].tokenizer()  # a wrong path is told now, not when somebody opens a trajectory
    secret = secrets.token_urlsafe(24) if token or not is_loopback(host) else ""
    with bind(host, port) as listening:
        actual_port = listening.getsockname()[1]
        typer.echo(f"{', '.join(run.name for run in runs)}: {address(host, actual_port, secret)}    (Ctrl-C ends it)")
        settings = uvicorn.Config(
            make_app(runs, token=secret),
            ws="none",
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        uvicorn.Server(settings).run(sockets=[listening])


def report_command(uri: str, out: Path | None) -> None:
    """Write a report and say where it is.

    Raises:
        InputError: no such run, or it has no step yet.
        UserError: a package is missing.
    """
    with explaining_missing_packages("rayapp report"):
        from rayapp.view.report import write_report
    written = write_report(uri, out)
    typer.echo(f"{written.page}\n{len(written.plots)} plots beside it")


@contextmanager
def explaining_missing_packages(command: str) -> Iterator[None]:
    """Raises UserError with the way out where an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UserError(f"{command} needs the package {error.name}: pip install 'rayapp[view]'") from None


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        InputError: the port is taken, may not be used, or the host is not this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        # Without it a second viewer could bind the same port until the first one listens.
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise InputError(
            f"--host {host} --port {port}: {error.strerror or error}. Give another --port, or --port 0 for any free one"
        ) from None
    return listening


def address(host: str, port: int, token: str) -> str:
    """What a person opens. A wildcard host is shown as this machine's name, which others can reach."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
