"""The command line: `rayapp COMMAND`, or `python -m rayapp COMMAND`.

Each command's module has an `app`, a Typer, and is imported when the command runs. Exit codes: 0 done, 1 failed, 2 bad
config or input (one message, no traceback), 3 the budget is spent, 130 interrupted.
"""

from __future__ import annotations

import importlib
import inspect
import locale
import logging
import os
import sys
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rayapp.cli.arguments import say_at_once
from rayapp.core.errors import (
    EXIT_BUDGET_SPENT,
    EXIT_FAILED,
    EXIT_USER_ERROR,
    BudgetSpentError,
    RayappError,
    UserError,
    first_line,
)
from rayapp.core.logs import make_logs_visible, show_traceback, visible

# Commands and groups, each with its Typer (`module:variable` here, or `extras.ROOM.module:variable`) and the first
# sentence of its help. A command of a group in another module has its own line: "config import-verl".
COMMANDS: dict[str, tuple[str, str]] = {
    "init": (
        "trying:init_app",
        "Write a project folder that trains as it is: config, task, rows, reward, README, Makefile.",
    ),
    "train": ("train:app", "Train as CONFIG says."),
    "eval": (
        "train:app",
        "Sample completions of every task or evaluation row, score them, and print the metrics with pass@k as JSON.",
    ),
    "sft": ("train:app", "Train on demonstrations as section `warmup` of CONFIG says."),
    "score": ("score:app", "Score completions as training would: in the sandbox, one JSON line each."),
    "view": ("extras.view.command:app", "Show runs in a browser: curves, groups, completions, tokens."),
    "doctor": ("doctor:app", "Report what this machine has and whether CONFIG can run on it."),
    "plan": ("plan:app", "Print a step's GPU memory by phase, its time and cost."),
    "submit": ("jobs:app", "Train as a job of a Ray cluster, or of Slurm"),
    "config": ("config:app", "Look at configurations."),
    "config import-verl": (
        "extras.verl.command:app",
        "Print a verl configuration as a rayapp config; a table on stderr shows what became of each key.",
    ),
    "data": ("data:app", "Prepare training data."),
    "task": ("extras.audit.command:app", "Work with tasks."),
    "try": ("trying:app", "Try a tool without training."),
    "model": ("model:app", "Fetch models."),
    "sandbox": ("sandbox:app", "Serve sandboxes, and end those that runs left."),
}


class _Deferred(TyperCommand):
    """A command whose module is imported when the command is parsed, not when it is listed."""

    def __init__(self, path: str) -> None:
        super().__init__(path.rpartition(" ")[2], short_help=COMMANDS[path][1])
        self.path = path

    def make_context(self, info_name: str | None, args: list[str], *given: Any, **extra: Any) -> Any:
        if args and "--help" not in args and " " not in self.path:
            say_at_once(f"rayapp {self.path}")
        return load_command(self.path).make_context(info_name, args, *given, **extra)


def load_command(path: str) -> TyperCommand | TyperGroup:
    name = path.rpartition(" ")[2]
    inside = {each.removeprefix(f"{path} "): _Deferred(each) for each in COMMANDS if each.startswith(f"{path} ")}
    loaded = _loaded(COMMANDS[path][0], bool(inside))
    if isinstance(loaded, TyperGroup) and name in loaded.commands:  # a Typer of several commands, e.g. train and eval
        return loaded.commands[name]  # type: ignore[return-value]
    if isinstance(loaded, TyperGroup):
        loaded.commands.update(inside)
    return loaded


@cache
def _loaded(place: str, is_group: bool) -> TyperCommand | TyperGroup:
    module, _, variable = place.partition(":")
    if module.startswith("extras."):
        from rayapp.core.names import load_extra

        typed: typer.Typer = load_extra(place.removeprefix("extras."))
    else:
        typed = getattr(importlib.import_module(f"rayapp.cli.{module}"), variable)
    typed.rich_markup_mode = None
    _list_whole_sentences(typed)
    return typer.main.get_group(typed) if is_group else typer.main.get_command(typed)  # type: ignore[return-value]


class _Commands(TyperGroup):
    """The commands of `COMMANDS`, then those defined in this module."""

    def __init__(self, *, commands: dict[str, Any], **settings: Any) -> None:
        deferred = {name: _Deferred(name) for name in COMMANDS if " " not in name}
        models = _Deferred("model")
        models.hidden = True  # a second name of the group
        super().__init__(commands={**deferred, **commands, "models": models}, **settings)


app = typer.Typer(
    name="rayapp",
    cls=_Commands,
    help="Post-train language models with GRPO on tasks where the model's own code runs in sandboxes.",
    epilog="Start with: rayapp doctor, then rayapp train configs/coding_warmup_cpu.yaml",
    no_args_is_help=True,
    context_settings={"max_content_width": 100},
    rich_markup_mode=None,  # the import of rich's help takes as long as all other imports together
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from rayapp.core import __version__

        typer.echo(f"rayapp {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit")
    ] = False,
) -> None:
    """Options of the program itself."""


def _list_whole_sentences(typed: typer.Typer) -> None:
    # Lists show the first paragraph of each command's help, which they would cut to one line.
    for command in typed.registered_commands:
        command.short_help = " ".join((inspect.getdoc(command.callback) or "").partition("\n\n")[0].split())


def main() -> None:
    """Run the command line of this process and exit with its code (the entry point)."""
    _begin_in_utf8()
    # Show only rayapp's own warnings; among libraries' warnings they would be overlooked.
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.getLogger("rayapp").addHandler(handler)
    make_logs_visible()
    sys.excepthook = show_traceback
    sys.exit(run(sys.argv[1:]))


def _begin_in_utf8() -> None:
    # The mode applies to every file and pipe, also in libraries and child processes. With C and POSIX, Python uses
    # UTF-8 anyway.
    is_utf8 = bool(sys.flags.utf8_mode) or locale.getencoding().lower() in ("utf-8", "utf8")
    if is_utf8 or os.environ.get("PYTHONUTF8") == "1":  # PYTHONUTF8=1 means that this program was already restarted
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Unexpected errors keep their traceback, except OSErrors."""
    try:
        app(args=arguments, prog_name="rayapp")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else EXIT_FAILED
    except UserError as error:
        typer.echo(visible(f"error: {error}"), err=True)
        return EXIT_USER_ERROR
    except BudgetSpentError as error:
        typer.echo(visible(f"stopped: {error}"), err=True)
        return EXIT_BUDGET_SPENT
    except RayappError as error:
        typer.echo(visible(f"failed: {type(error).__name__}: {error}"), err=True)
        return EXIT_FAILED
    except OSError as error:
        typer.echo(visible(_told(error)), err=True)
        return EXIT_USER_ERROR if isinstance(error, _OF_THE_USER) else EXIT_FAILED
    return 0


_OF_THE_USER = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)


def _told(error: OSError) -> str:
    if error.filename is None:
        return f"failed: {type(error).__name__}: {first_line(error)}"
    cures = {
        PermissionError: " Choose a file or folder that this user may use, or change its owner or mode.",
        FileNotFoundError: " Check the path.",
    }
    said = f"{error.filename}: {error.strerror or type(error).__name__}."
    return f"{'error' if isinstance(error, _OF_THE_USER) else 'failed'}: {said}{cures.get(type(error), '')}"


_list_whole_sentences(app)
