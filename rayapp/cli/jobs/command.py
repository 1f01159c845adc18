"""`rayapp submit`, `rayapp status` and `rayapp stop`. Called by `rayapp.cli.main`; loads Ray only when it runs."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from rayapp.cli.arguments import EXIT_FAILED
from rayapp.core.errors import ConfigError
from rayapp.core.terminal import visible

app = typer.Typer()

EXIT_INTERRUPTED = 130
Address = Annotated[
    str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Of Ray's dashboard, e.g. http://127.0.0.1:8265")
]


@app.command(
    epilog="Examples:\n\n"
    "  rayapp submit configs/coding_cpu.yaml run.output_dir=$PWD/outputs model.path=$PWD/models/smollm2-135m\n\n"
    "  RAY_AUTH_MODE=token RAY_AUTH_TOKEN=… rayapp submit configs/coding_8gpu.yaml run.output_dir=/var/outputs "
    "--address http://127.0.0.1:8265"
)
def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file below the current folder")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE")] = None,
    address: Address = "http://127.0.0.1:8265",
    follow: Annotated[bool, typer.Option("--follow", help="Show the log until the run ends")] = False,
    python: Annotated[str, typer.Option(help="Python of the cluster")] = "python",
) -> None:
    """Train as a job of a Ray cluster. The current folder is uploaded; a token is taken from RAY_AUTH_TOKEN."""
    from rayapp.cli.jobs import submit as jobs

    job = jobs.plan(config, overrides or (), python=python, now=datetime.now(UTC))
    submission_id = jobs.submit(job, address)
    typer.echo(
        f"job {submission_id} runs; dashboard {address}/#/jobs/{submission_id}\n"
        f"  log:  ray job logs --follow --address {address} {submission_id}\n"
        f"  stop: rayapp stop {submission_id} --address {address}",
        err=True,
    )
    if not follow:
        typer.echo(submission_id)
        return
    try:
        status = jobs.follow(submission_id, address, _write)
    except KeyboardInterrupt:
        typer.echo(f"job {submission_id} goes on", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(f"job {submission_id}: {status}", err=True)
    if status != "SUCCEEDED":
        raise typer.Exit(EXIT_INTERRUPTED if status == "STOPPED" else EXIT_FAILED)


@app.command(epilog="Examples:\n\n  rayapp stop coding_cpu-20261121-080000\n\n  rayapp stop --all --timeout-s 240")
def stop(
    submission_ids: Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Submission ids")] = None,
    all_jobs: Annotated[bool, typer.Option("--all", help="Every job that runs")] = False,
    address: Address = "http://127.0.0.1:8265",
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest wait, in seconds")] = 240.0,
) -> None:
    """Stop jobs and wait until each has saved its checkpoint and given its sandboxes back."""
    from rayapp.cli.jobs import submit as jobs

    if bool(submission_ids) == all_jobs:
        raise ConfigError("name the jobs to stop, or give --all, not both and not neither")
    for submission_id, status in jobs.stop(submission_ids or (), address, timeout_s=timeout_s).items():
        typer.echo(f"{submission_id}: {status}")


@app.command(epilog="Examples:\n\n  rayapp status\n\n  rayapp status coding_cpu-20261121-080000")
def status(
    submission_ids: Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Submission ids; none: all")] = None,
    address: Address = "http://127.0.0.1:8265",
) -> None:
    """Say which jobs a Ray cluster has: job, status, seconds, run, and Ray's message. The log: ray job logs JOB."""
    from rayapp.cli.jobs import submit as jobs

    for job in jobs.states(submission_ids or (), address, at=datetime.now(UTC)):
        line = f"{job.submission_id}  {job.status}  {job.seconds:.0f} s  run {job.run_name or '-'}  {job.message}"
        typer.echo(visible(line))


def _write(text: str) -> None:
    sys.stdout.write(visible(text, keeps_colours=True))
    sys.stdout.flush()
