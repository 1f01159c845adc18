"""`rayapp submit`, `rayapp status`, `rayapp stop`: runs as jobs of a Ray cluster, on a workstation or under KubeRay;
`submit --slurm` makes a job of Slurm, which trains in the current folder by configs/slurm/train.sh.

`submit` does the same as `ray job submit`, but first checks what would fail on the cluster: the config, paths that
exist only on this machine, and a run of the same name that is still running. The commands talk to the dashboard over
HTTP: they never start Ray and never attach to it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
import yaml

from rayapp.cli.arguments import EXIT_FAILED
from rayapp.config.config import Config
from rayapp.config.loading import load_config, to_yaml
from rayapp.core.errors import WRONG_TOKEN, ConfigError, DeadlineError, InputError, RayappError, first_line
from rayapp.core.logs import visible

app = typer.Typer()

EXIT_INTERRUPTED = 130
Address = Annotated[
    str, typer.Option(envvar="RAY_API_SERVER_ADDRESS", help="Address of Ray's dashboard, e.g. http://127.0.0.1:8265")
]


@app.command(
    epilog="Examples:\n\n"
    "  rayapp submit configs/coding_cpu.yaml run.output_dir=$PWD/outputs model.path=$PWD/models/smollm2-135m\n\n"
    "  RAY_AUTH_MODE=token RAY_AUTH_TOKEN=… rayapp submit configs/coding_8gpu.yaml run.output_dir=/var/outputs "
    "--address http://127.0.0.1:8265\n\n"
    "  rayapp submit configs/coding_2x8gpu.yaml --slurm --sbatch '--nodes=2 --gpus-per-node=8 --exclusive --mem=0'"
)
def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file below the current folder")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY.SUB=VALUE")] = None,
    address: Address = "http://127.0.0.1:8265",
    follow: Annotated[bool, typer.Option("--follow", help="Show the log until the run ends")] = False,
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
    """Train as a job of a Ray cluster, or of Slurm. For Ray it uploads the current folder; RAY_AUTH_TOKEN holds the
    cluster's token."""

    if slurm:
        _submit_to_slurm(config, overrides or (), sbatch or (), follow=follow, python=python)
        return
    if sbatch:
        raise ConfigError("--sbatch sets options of Slurm jobs only: add --slurm, or leave --sbatch out")
    job = plan_job(config, overrides or (), python=python or "python", now=datetime.now(UTC))
    submission_id = submit_job(job, address)
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
        status = follow_job(submission_id, address, _write)
    except KeyboardInterrupt:
        typer.echo(f"job {submission_id} continues", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(f"job {submission_id}: {status}", err=True)
    if status != "SUCCEEDED":
        raise typer.Exit(EXIT_INTERRUPTED if status == "STOPPED" else EXIT_FAILED)


def _submit_to_slurm(
    config: Path, overrides: Sequence[str], options: Sequence[str], *, follow: bool, python: str | None
) -> None:
    job_id = submit_batch(config, overrides, options, python=python)
    typer.echo(
        f"job {job_id} is in Slurm's queue\n"
        f"  state: squeue --job {job_id}\n"
        f"  log:   tail -F {shlex.quote(str(batch_job(job_id).log))}\n"
        f"  stop:  scancel --batch --signal=TERM {job_id}   (saves first; a plain scancel does not)",
        err=True,
    )
    if not follow:
        typer.echo(job_id)
        return
    try:
        job = follow_batch(job_id, _write)
    except KeyboardInterrupt:
        typer.echo(f"job {job_id} continues", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    typer.echo(f"job {job_id}: {job.state}", err=True)
    if job.state == "CANCELLED":
        raise typer.Exit(EXIT_INTERRUPTED)
    if job.state != "COMPLETED":
        raise typer.Exit(job.exit_code or EXIT_FAILED)


@app.command(epilog="Examples:\n\n  rayapp stop coding_cpu-20261121-080000\n\n  rayapp stop --all --timeout-s 240")
def stop(
    submission_ids: Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Submission ids")] = None,
    all_jobs: Annotated[bool, typer.Option("--all", help="Stop every running job")] = False,
    address: Address = "http://127.0.0.1:8265",
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest wait, in seconds")] = 240.0,
) -> None:
    """Stop jobs and wait until each has saved its checkpoint and returned its sandboxes."""

    if submission_ids and all_jobs:
        raise ConfigError("--all stops every job, but jobs are named too: leave --all out, or the names")
    if not submission_ids and not all_jobs:
        raise ConfigError("no job is given: give the jobs to stop, or --all")
    for submission_id, status in stop_jobs(submission_ids or (), address, timeout_s=timeout_s).items():
        typer.echo(f"{submission_id}: {status}")


@app.command(epilog="Examples:\n\n  rayapp status\n\n  rayapp status coding_cpu-20261121-080000")
def status(
    submission_ids: Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Submission ids; none: all")] = None,
    address: Address = "http://127.0.0.1:8265",
) -> None:
    """List the jobs of a Ray cluster: job, status, seconds, run, and Ray's message. For a log: ray job logs JOB."""

    found = list(job_states(submission_ids or (), address, at=datetime.now(UTC)))
    if not found:
        typer.echo(f"no jobs at {address}", err=True)
    for job in found:
        line = f"{job.submission_id}  {job.status}  {job.seconds:.0f} s  run {job.run_name or '-'}  {job.message}"
        typer.echo(visible(line))


def _write(text: str) -> None:
    sys.stdout.write(visible(text, keeps_colours=True))
    sys.stdout.flush()


RUNTIME_ENV = Path(__file__).with_name("job.yaml")
RUN_NAME, CONFIG = "run_name", "config"
"""Keys of the metadata of a job."""
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as it is submitted to Ray."""

    submission_id: str
    entrypoint: str
    runtime_env: dict[str, Any]
    metadata: dict[str, str]


def plan_job(config_path: Path, overrides: Sequence[str], *, python: str, now: datetime) -> Job:
    """Check a run's config and return the job that trains it.

    Args:
        config_path: a file below the current folder, which is uploaded.
        python: Python interpreter on the cluster.
    Raises:
        ConfigError: the config is wrong, or names a path that doesn't exist on the cluster.
    """
    config = load_config(config_path, overrides)
    _check_paths(config, config_path)
    runtime_env = yaml.safe_load(RUNTIME_ENV.read_text()) | {"working_dir": "."}
    return Job(
        submission_id=f"{config.run.name}-{now:%Y%m%d-%H%M%S}",
        entrypoint=shlex.join([python, "-m", "rayapp", "train", os.path.relpath(config_path), *overrides]),
        runtime_env=runtime_env,
        metadata={"job_name": config.run.name, RUN_NAME: config.run.name, CONFIG: to_yaml(config)},
    )


def _check_paths(config: Config, config_path: Path) -> None:
    here = Path.cwd()
    if not config_path.resolve().is_relative_to(here):
        raise ConfigError(
            f"{config_path} is not below {here}, the folder that is uploaded for the job. Copy it into that folder."
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


def submit_job(job: Job, address: str) -> str:
    """Start the job. Returns its id.

    Raises:
        ConfigError: the cluster can't be reached, refuses the token, or already runs a run of this name.
    """
    with _explained(address):
        client = _client(address)
        _check_name_is_free(client, job)
        submission_id: str = client.submit_job(**asdict(job))
    return submission_id


def _check_name_is_free(client: Any, job: Job) -> None:
    for other in client.list_jobs():
        if (other.metadata or {}).get(RUN_NAME) == job.metadata[RUN_NAME] and other.status not in ENDED:
            raise ConfigError(
                f"run {job.metadata[RUN_NAME]!r} is {other.status.lower()} on this cluster already, as job "
                f"{other.submission_id}. Stop it (rayapp stop {other.submission_id}), or choose another run.name."
            )


def follow_job(submission_id: str, address: str, write: Callable[[str], None]) -> str:
    """Write the job's log until the job ends. Returns its last status."""

    async def tail() -> None:
        async for text in client.tail_job_logs(submission_id):
            write(text)

    with _explained(address):
        client = _client(address)
        asyncio.run(tail())
        # The log ends a moment before Ray records the job's status.
        return _wait(client, submission_id, timeout_s=30.0)


def stop_jobs(submission_ids: Sequence[str], address: str, *, timeout_s: float) -> dict[str, str]:
    """Stop these jobs, or all running jobs if none is named, and wait for them. Returns submission id -> last status.

    Raises:
        ConfigError: the cluster can't be reached, or has no such job.
        DeadlineError: a job has not ended in time, e.g. because it is still saving.
    """
    deadline = time.monotonic() + timeout_s
    with _explained(address):
        client = _client(address)
        ids = list(submission_ids) or [j.submission_id for j in client.list_jobs() if j.status not in ENDED]
        for submission_id in ids:
            client.stop_job(submission_id)
        return {i: _wait(client, i, timeout_s=max(0.0, deadline - time.monotonic())) for i in ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job as Ray reports it."""

    submission_id: str
    run_name: str
    """Name of the run; empty for a job that `rayapp submit` did not start."""
    status: str
    seconds: float
    """Time from the job's start to its end, or until now; 0 if it has not started."""
    message: str


def job_states(submission_ids: Sequence[str], address: str, *, at: datetime) -> list[JobState]:
    """Return the states of these jobs, or of all submitted jobs if none is named, oldest first.

    Raises:
        ConfigError: the cluster can't be reached, or has no such job.
    """
    with _explained(address):
        client = _client(address)
        found = [client.get_job_info(i) for i in submission_ids] or [j for j in client.list_jobs() if j.submission_id]
    return [_state(job, at) for job in sorted(found, key=lambda job: job.start_time or 0)]


def _state(job: Any, at: datetime) -> JobState:
    # Ray's times are in milliseconds since 1970.
    end_ms = job.end_time or at.timestamp() * 1000
    return JobState(
        submission_id=job.submission_id,
        run_name=(job.metadata or {}).get(RUN_NAME, ""),
        status=str(job.status.value),
        seconds=max(0.0, (end_ms - job.start_time) / 1000) if job.start_time else 0.0,
        message=first_line(Exception(job.message or "-")),
    )


def _wait(client: Any, submission_id: str, *, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while (status := str(client.get_job_status(submission_id).value)) not in ENDED:
        if time.monotonic() >= deadline:
            raise DeadlineError(
                f"job {submission_id} is still {status.lower()} after {timeout_s:g} s. Wait longer with --timeout-s"
            )
        time.sleep(POLL_S)
    return status


def _client(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise InputError(f"Ray can't be imported ({error}): make venv, or pip install 'ray[default]'") from None
    if not address.startswith(("http://", "https://")):
        raise ConfigError(
            f"address {address!r} must begin with http:// or https://: give the URL of Ray's dashboard, e.g. "
            "http://127.0.0.1:8265. With KubeRay: kubectl port-forward service/NAME-head-svc 8265"
        )
    token = token_for(address)
    return JobSubmissionClient(address, headers={"Authorization": f"Bearer {token}"} if token else None)


def token_for(address: str) -> str:
    """Return the token for Ray's dashboard; empty if none is known.

    Ray's own client sends a token only if RAY_AUTH_MODE is token, but a plain `ray start` requires one as soon as
    ~/.ray/auth_token exists, which a run creates. That file holds this machine's token: use it only for addresses of
    this machine.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token
    given = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    if not given and urlsplit(address).hostname not in ("127.0.0.1", "localhost", "::1"):
        return ""
    try:
        return Path(given or Path.home() / ".ray" / "auth_token").read_text().strip()
    except (OSError, RuntimeError, UnicodeDecodeError):
        return ""


@contextmanager
def _explained(address: str) -> Iterator[None]:
    """Turn Ray's errors into ConfigErrors that name the way out."""
    try:
        yield
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray dashboard answers at {address} ({first_line(error)}). Check that Ray runs, and that this is the "
            "address of its dashboard (port 8265). With KubeRay: kubectl port-forward service/NAME-head-svc 8265"
        ) from None
    except Exception as error:  # boundary: Ray raises RuntimeError, or AuthenticationError for a wrong token
        if isinstance(error, RayappError):
            raise
        text = str(error)
        if any(sign in text for sign in ("401", "403", "Unauthori", "uthentica", "token")):
            raise ConfigError(
                f"the Ray dashboard at {address} refuses the token ({first_line(error)}). {WRONG_TOKEN}"
            ) from None
        raise ConfigError(f"the Ray dashboard at {address} refused the request: {first_line(error)}") from None


SCRIPT = Path(__file__).parents[2] / "configs" / "slurm" / "train.sh"
ENDED_BATCH = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""States of jobs that Slurm does not run again. A job that goes back into the queue is PENDING."""
BATCH_POLL_S = 2.0
SILENCE_S = 600.0
"""Longest time without an answer of Slurm's controller while a job is followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A job as Slurm reports it."""

    state: str
    exit_code: int
    log: Path

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED_BATCH


def submit_batch(config_path: Path, overrides: Sequence[str], options: Sequence[str], *, python: str | None) -> str:
    """Check a run's config and hand the run to Slurm. Returns the job's id.

    Args:
        options: options of sbatch, each a text with one or several of them.
        python: Python interpreter on the nodes; None: this one, or `python` in an image (RAYAPP_IMAGE).
    Raises:
        ConfigError: the config is wrong, a run of this name is a job already, or Slurm refuses the job.
        InputError: this machine has no Slurm, or the script is missing.
    """
    name = load_config(config_path, overrides).run.name
    if not SCRIPT.is_file():
        raise InputError(f"{SCRIPT} does not exist: wheels don't contain it. Run this in a clone of the project.")
    if running := slurm("squeue", "--noheader", "--me", f"--name={name}", "--format=%A %T").split():
        raise ConfigError(
            f"run {name!r} is {running[1].lower()} in Slurm already, as job {running[0]}. Stop it (scancel --batch "
            f"--signal=TERM {running[0]}), or choose another run.name."
        )
    interpreter = python or ("python" if os.environ.get("RAYAPP_IMAGE") else sys.executable)
    asked = [word for text in options for word in shlex.split(text)]
    command = ("sbatch", "--parsable", f"--job-name={name}", *asked, str(SCRIPT), str(config_path), *overrides)
    # The id, and on federated clusters ";" and the cluster's name.
    return slurm(*command, RAYAPP_PYTHON=interpreter).strip().partition(";")[0]


def slurm(*command: str, **environment: str) -> str:
    """Return the output of one of Slurm's commands.

    Raises:
        InputError: this machine has no Slurm.
        ConfigError: the command failed.
    """
    try:
        done = subprocess.run(
            command, env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise InputError(
            f"{command[0]} is not on this machine: run this on a login node of the Slurm cluster."
        ) from None
    if done.returncode != 0:
        raise ConfigError(f"{command[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def batch_job(job_id: str) -> BatchJob:
    """Return the state of a job.

    Raises:
        ConfigError: Slurm's controller does not answer, or has forgotten the job.
    """
    text = slurm("scontrol", "show", "job", job_id)
    fields = dict(re.findall(r"^ +(JobState|StdOut|Restarts)=(.*)$", text, re.MULTILINE))
    exit_code = re.search(r"\bExitCode=(\d+):(\d+)", text)
    if exit_code is None or not {"JobState", "StdOut"} <= fields.keys():
        raise ConfigError(f"scontrol show job {job_id} printed no state: {text[:200]!r}")
    return BatchJob(
        state=fields["JobState"].split()[0], exit_code=int(exit_code[1]), log=Path(fields["StdOut"].strip())
    )


def follow_batch(job_id: str, write: Callable[[str], None]) -> BatchJob:
    """Write the job's log until the job has ended, also while it waits in the queue again. Returns its last state.

    Raises:
        DeadlineError: Slurm's controller does not answer any more.
    """
    position, answered = 0, time.monotonic()
    while True:
        try:
            job = batch_job(job_id)
        except ConfigError as error:
            if time.monotonic() - answered > SILENCE_S:
                raise DeadlineError(f"job {job_id} can't be followed any more: {error}") from None
        else:
            answered = time.monotonic()
            position = _write_new(job.log, position, write)
            if job.has_ended:
                return job
        time.sleep(BATCH_POLL_S)


def _write_new(log: Path, position: int, write: Callable[[str], None]) -> int:
    """Write what the log has from this position on. Returns its new length."""
    try:
        with log.open("rb") as file:
            file.seek(position)
            while chunk := file.read(1 << 20):
                write(chunk.decode(errors="replace"))
            return file.tell()
    except FileNotFoundError:  # the job has not begun
        return position
