"""`rayapp submit --slurm`: a run as a job of Slurm, by configs/slurm/train.sh.

The job runs in the current folder, which Slurm's nodes must share; nothing is copied.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayapp.config.loading import load_config
from rayapp.core.errors import ConfigError, DeadlineError, InputError

SCRIPT = Path(__file__).parents[2] / "configs" / "slurm" / "train.sh"
ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""States of jobs that Slurm does not run again. A job that goes back into the queue is PENDING."""
POLL_S = 2.0
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
        return self.state in ENDED


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
        raise InputError(f"{SCRIPT} is missing, as in every installed wheel: run this in a clone of the project.")
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
        time.sleep(POLL_S)


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
