"""`rayapp submit`, `rayapp status`, `rayapp stop`: a run as a job of a Ray cluster, on a workstation or under KubeRay.

It does what `ray job submit` does, after checking what would fail over there: the config, paths that only exist here, a
run of that name that is still going on. Called by `rayapp.cli.jobs.command`. It never starts a Ray and never attaches
to one.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from rayapp.config.config import Config
from rayapp.config.loading import load_config, to_yaml
from rayapp.core.errors import WRONG_TOKEN, ConfigError, DeadlineError, InputError, RayappError, first_line

RUNTIME_ENV = Path(__file__).with_name("job.yaml")
RUN_NAME, CONFIG = "run_name", "config"
"""Keys of the job's metadata."""
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job as it is handed to Ray."""

    submission_id: str
    entrypoint: str
    runtime_env: dict[str, Any]
    metadata: dict[str, str]


def plan(config_path: Path, overrides: Sequence[str], *, python: str, now: datetime) -> Job:
    """The job of a run.

    Args:
        config_path: below the current folder, which is uploaded.
        python: of the cluster.
    Raises:
        ConfigError: the config is wrong, or names a path that means nothing over there.
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
        raise ConfigError(f"{config_path} is not below {here}, the folder that the job gets a copy of. Copy it there.")
    if not config.run_folder.is_absolute():
        raise ConfigError(
            f"run.output_dir is {config.run.output_dir!r}: a job runs in a temporary copy of this folder, and "
            f"checkpoints written into it go with it. Give a path of the cluster: run.output_dir={here / 'outputs'}"
        )
    model = Path(config.model.path)
    if not model.is_absolute() and model.is_dir():
        raise ConfigError(
            f"model.path {config.model.path!r} is a folder here, and .gitignore keeps it out of the job's copy. Give a "
            f"path of the cluster, e.g. model.path={model.resolve()}, or a hub id."
        )


def submit(job: Job, address: str) -> str:
    """Start the job. Returns its id.

    Raises:
        ConfigError: the cluster can't be reached, refuses the token, or runs a run of this name already.
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


def follow(submission_id: str, address: str, write: Callable[[str], None]) -> str:
    """Pass on the job's log until it ends. Returns its last status."""

    async def tail() -> None:
        async for text in client.tail_job_logs(submission_id):
            write(text)

    with _explained(address):
        client = _client(address)
        asyncio.run(tail())
        # The log ends a moment before Ray has noted how.
        return _wait(client, submission_id, timeout_s=30.0)


def stop(submission_ids: Sequence[str], address: str, *, timeout_s: float) -> dict[str, str]:
    """Stop jobs, every running one when none is named, and wait for them. Returns their last statuses.

    Raises:
        ConfigError: the cluster can't be reached, or has no such job.
        DeadlineError: one is still busy saving.
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
    """The state of a job, as Ray tells it."""

    submission_id: str
    run_name: str
    """Name of the run; empty for a job that `rayapp submit` did not start."""
    status: str
    seconds: float
    """Time since its start, or from start to end; 0 before it."""
    message: str


def states(submission_ids: Sequence[str], address: str, *, at: datetime) -> list[JobState]:
    """These jobs, or every one that was submitted when none is named, the oldest first.

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
            raise DeadlineError(f"job {submission_id} is still {status.lower()} after {timeout_s:g} s")
        time.sleep(POLL_S)
    return status


def _client(address: str) -> Any:
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise InputError(f"Ray can't be imported ({error}): make venv, or pip install 'ray[default]'") from None
    if not address.startswith(("http://", "https://")):
        raise ConfigError(
            f"address {address!r} must be that of the dashboard, e.g. http://127.0.0.1:8265. With KubeRay: kubectl "
            "port-forward service/NAME-head-svc 8265"
        )
    token = token_for(address)
    return JobSubmissionClient(address, headers={"Authorization": f"Bearer {token}"} if token else None)


def token_for(address: str) -> str:
    """The token of a Ray that asks for one; empty where none is known. Ray's own client looks for it only where
    RAY_AUTH_MODE is token, but a plain `ray start` asks as soon as a run has made ~/.ray/auth_token.

    That file is this machine's: it is read for an address of this machine alone.
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
    """Turn Ray's errors into ones that say what the user can do."""
    try:
        yield
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray dashboard answers at {address} ({first_line(error)}). Is the address that of the dashboard (port "
            "8265), and does Ray run? With KubeRay: kubectl port-forward service/NAME-head-svc 8265"
        ) from None
    except Exception as error:  # boundary: Ray raises RuntimeError, or AuthenticationError for a wrong token
        if isinstance(error, RayappError):
            raise
        text = str(error)
        if any(sign in text for sign in ("401", "403", "Unauthori", "uthentica", "token")):
            raise ConfigError(f"{address} refuses the token ({first_line(error)}). {WRONG_TOKEN}") from None
        raise ConfigError(f"{address} refused: {first_line(error)}") from None
