"""The command line: `rayapp COMMAND`, or `python -m rayapp COMMAND`.

Each command has a file here, with `app`, its Typer. It loads what it needs when it runs, so that `rayapp --help` starts
at once. Exit codes: 0 done, 1 failed, 2 bad config or input, 130 interrupted. Errors that a user can mend are
printed as one message without a traceback.
"""

from __future__ import annotations

import locale
import logging
import os
import sys
from typing import Annotated

import typer

from rayapp.cli import config, data, doctor, mcp, model, plan, plugins, score, sft, sync, train, view
from rayapp.cli import eval as evaluate
from rayapp.cli.arguments import EXIT_FAILED, EXIT_USER_ERROR
from rayapp.cli.gpu_check import command as gpu_check
from rayapp.cli.jobs import command as jobs
from rayapp.cli.kuberay import command as kuberay
from rayapp.cli.rescore import command as rescore
from rayapp.cli.sandbox import command as sandbox
from rayapp.cli.serving import command as serve
from rayapp.cli.task import command as task
from rayapp.cli.trying import command as trying
from rayapp.core.errors import RayappError, UserError
from rayapp.core.terminal import make_logs_visible, show_traceback, visible

app = typer.Typer(
    name="rayapp",
    help="Post-train language models with GRPO on tasks where the model's own code runs in sandboxes.",
    epilog="Start with: rayapp doctor, then rayapp train configs/coding_cpu.yaml",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from rayapp.core.version import __version__

        typer.echo(f"rayapp {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Options of the program itself."""


GROUPS = {
    "config": config, "data": data, "task": task, "try": trying, "model": model, "sandbox": sandbox, "mcp": mcp,
}  # fmt: skip
for command in (
    train,
    sft,
    evaluate,
    serve,
    score,
    rescore,
    view,
    doctor,
    plan,
    gpu_check,
    jobs,
    sync,
    plugins,
    kuberay,
):
    app.add_typer(command.app)
for name, group in GROUPS.items():
    app.add_typer(group.app, name=name)
app.add_typer(model.app, name="models", hidden=True)


def main() -> None:
    """Entry point: runs a command and turns what went wrong into an exit code."""
    _begin_in_utf8()
    # Our own warnings only: the libraries' would drown them.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.getLogger("rayapp").addHandler(handler)
    make_logs_visible()
    sys.excepthook = show_traceback
    sys.exit(run(sys.argv[1:]))


def _begin_in_utf8() -> None:
    """Files and pipes are UTF-8 whatever the locale says: where it says another, begin again in Python's UTF-8 mode.

    One place for every file, those that libraries open too; processes that this one starts inherit it. With the locales
    C and POSIX Python does so by itself.
    """
    is_utf8 = bool(sys.flags.utf8_mode) or locale.getencoding().lower() in ("utf-8", "utf8")
    if is_utf8 or os.environ.get("PYTHONUTF8") == "1":  # the latter: begun again already, against an option of Python's
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. An unexpected error keeps its traceback."""
    try:
        app(args=arguments, prog_name="rayapp")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else EXIT_FAILED
    except UserError as error:
        typer.echo(visible(f"error: {error}"), err=True)
        return EXIT_USER_ERROR
    except RayappError as error:
        typer.echo(visible(f"failed: {type(error).__name__}: {error}"), err=True)
        return EXIT_FAILED
    return 0
