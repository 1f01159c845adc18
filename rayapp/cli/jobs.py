"""`rayapp submit`: check a run's config, and hand it to `ray job submit`, or to Slurm's sbatch.

The checks find what would fail only on the cluster: a wrong config, and paths that exist on this machine alone.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.core.errors import ConfigError, InputError

app = typer.Typer()
RUNTIME_ENV = Path(__file__).with_name("job.yaml")
SCRIPT = Path(__file__).parents[2] / "configs" / "slurm" / "train.sh"


@app.command(
    epilog="Examples:\n\n"
    "  rayapp submit configs/coding_cpu.yaml run.output_dir=$PWD/outputs model.path=$PWD/models/smollm2-135m\n\n"
    "  rayapp submit configs/coding_8gpu.yaml run.output_dir=/var/outputs --address http://127.0.0.1:8265 --follow\n\n"
    "  rayapp submit configs/coding_2x8gpu.yaml --slurm --sbatch '--nodes=2 --gpus-per-node=8 --exclusive --mem=0'"
)
def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file below the current folder")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE")] = None,
    address: Annotated[
        str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Address of Ray's dashboard")
    ] = "http://127.0.0.1:8265",
    follow: Annotated[bool, typer.Option("--follow", help="Show the log until the job ends")] = False,
    python: Annotated[
        str | None, typer.Option(help="Python interpreter on the cluster [default: python; --slurm: this one]")
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Train as a job of Slurm, in the current folder (docs/operate.md)")
    ] = False,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="With --slurm: options of sbatch, e.g. '--nodes=2 --gpus-per-node=8'")
    ] = None,
) -> None:
    """Train as a job of a Ray cluster, or of Slurm: prints the command (ray job submit, sbatch) and runs it.

    The job's log, state and end are Ray's own commands (ray job logs, status, stop), or squeue and scancel.
    """
    loaded = load_config(config, overrides or ())
    if slurm:
        command = sbatch_command(loaded, config, overrides or (), sbatch or (), follow=follow)
        interpreter = python or ("python" if os.environ.get("RAYAPP_IMAGE") else sys.executable)
        raise typer.Exit(_run(command, {"RAYAPP_PYTHON": interpreter}))
    if sbatch:
        raise ConfigError("--sbatch sets options of Slurm jobs only: add --slurm, or leave --sbatch out")
    check_paths(loaded, config)
    trained = [python or "python", "-m", "rayapp", "train", os.path.relpath(config), *(overrides or ())]
    name = f"{loaded.run.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    command = ["job", "submit", "--address", address, "--submission-id", name, "--working-dir", "."]
    command += ["--runtime-env", str(RUNTIME_ENV), *([] if follow else ["--no-wait"]), "--", *trained]
    raise typer.Exit(_run([sys.executable, "-m", "ray.scripts.scripts", *command], token_mode(address), shown="ray"))


def sbatch_command(
    config: Config, path: Path, overrides: Sequence[str], options: Sequence[str], *, follow: bool = False
) -> list[str]:
    """Return the sbatch command of a run; `options` are texts with one or several options of sbatch."""
    if not SCRIPT.is_file():
        raise InputError(f"{SCRIPT} does not exist: wheels don't contain it. Run this in a clone of the project.")
    asked = [word for text in options for word in shlex.split(text)]
    waits = ["--wait"] if follow else []
    return ["sbatch", "--parsable", f"--job-name={config.run.name}", *waits, *asked, str(SCRIPT), str(path), *overrides]


def check_paths(config: Config, path: Path) -> None:
    """Check that the config is uploaded with the current folder, and that the job will find what it names."""
    here = Path.cwd()
    if not path.resolve().is_relative_to(here):
        raise ConfigError(
            f"{path} is not below {here}, the folder that is uploaded for the job. Copy it into that folder."
        )
    if not config.run_folder.is_absolute():
        raise ConfigError(
            f"run.output_dir is the relative path {config.run.output_dir!r}: checkpoints would be deleted with the "
            "job's temporary copy of this folder. Give an absolute path on the cluster, e.g. "
            f"run.output_dir={here / 'outputs'}"
        )
    model = Path(config.model.path)
    if not model.is_absolute() and model.is_dir():
        raise ConfigError(
            f"model.path {config.model.path!r} would not exist in the job: .gitignore excludes this folder from the "
            f"upload. Give a path on the cluster, e.g. model.path={model.resolve()}, or a hub id."
        )


def token_mode(address: str) -> dict[str, str]:
    """Return the variable with which Ray's client sends its token, if there is a token for this address.

    By itself the client sends none, but a plain `ray start` requires one once ~/.ray/auth_token exists, which a run
    creates. That is this machine's token, for addresses of this machine.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return {}
    is_here = urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")
    has_own = is_here and (Path.home() / ".ray" / "auth_token").is_file()
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return {"RAY_AUTH_MODE": "token"} if given or has_own else {}


def _run(command: Sequence[str], variables: Mapping[str, str], *, shown: str = "") -> int:
    words = [shown, *command[3:]] if shown else command
    typer.echo(shlex.join([*(f"{name}={value}" for name, value in variables.items()), *words]), err=True)
    try:
        return subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
    except FileNotFoundError:
        raise InputError(f"{command[0]} is not on this machine: run this on a login node of the cluster.") from None
