"""Runs as jobs of a real Slurm with two virtual nodes: over both, preempted and continued, stopped, in an image."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.slurm import DEADLINE_S, Slurm, SlurmMissingError, running_slurm
from support.timing import wait_until
from support.whole_runs import records

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
ENDED_BATCH = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"
}  # fmt: skip
"""States of jobs that Slurm does not run again. A job that goes back into the queue is PENDING."""
APPTAINER = """#!/bin/bash
# In place of Apptainer, which Debian does not have: it checks the arguments and runs the program outside.
set -eu
echo "apptainer $*" >> "$APPTAINER_CALLS"
[ "$1" = exec ]; shift
while [ "${1#--}" != "$1" ]; do
    case $1 in --pwd) cd "$2"; shift 2 ;; --bind) test -d "$2"; shift 2 ;; --nv) shift ;; *) exit 64 ;; esac
done
test -f "$1"; shift
exec "$@"
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    try:
        with running_slurm() as cluster:
            yield cluster
    except SlurmMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def config(tiny_run: Callable[[str, Path], dict[str, Any]], tmp_path: Path) -> Callable[..., Path]:
    """Call it with a run's name and its number of steps: the file of a config whose run folder is beside it."""

    def write(name: str, num_steps: int) -> Path:
        config = tiny_run(name, tmp_path)
        config["train"]["num_steps"] = num_steps
        config["server"]["start_timeout_s"] = 5 * DEADLINE_S
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    return write


def submit(slurm: Slurm, config: Path, *options: str, **environment: str) -> Any:
    """Submit as a user does on a login node, with a home that the nodes share."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    home = config.parent / "home"
    home.mkdir(exist_ok=True)
    path = f"{config.parent}{os.pathsep}{os.environ['PATH']}"
    return slurm.run(
        sys.executable, "-m", "rayapp", "submit", config.name, "--slurm", *options,
        cwd=config.parent, env={**kept, "PYTHONPATH": f"{ROOT}", "HOME": str(home), "PATH": path, **environment},
    )  # fmt: skip


def steps_of(folder: Path) -> list[int]:
    return [record["step"] for record in records(folder)]


def test_a_preempted_run_over_two_nodes_saves_and_goes_on_from_its_checkpoint(
    slurm: Slurm, config: Callable[..., Path], tmp_path: Path
) -> None:
    file, run = config("preempted", 5000), tmp_path / "preempted"
    done = submit(slurm, file, "--sbatch", "--partition=low --nodes=2 --exclusive --mem=0")
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    log = tmp_path / f"preempted-{job}.log"

    def told() -> str:
        return f"{slurm.job(job)}\n{log.read_text() if log.exists() else ''}\n{slurm.logs()}"

    def has_step(step: int) -> bool:
        assert slurm.job(job)["JobState"] not in ENDED_BATCH, told()
        return max(steps_of(run), default=0) >= step

    wait_until(lambda: has_step(2), told, timeout_s=DEADLINE_S)
    assert len({line.split()[-1] for line in nodes_in(log)}) == 2, told()
    assert not list(run.glob("checkpoints/step=*")), "the only checkpoint is the one that preemption makes"

    urgent = slurm.run("sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1")
    assert urgent.returncode == 0, urgent.stderr
    wait_until(lambda: slurm.job(urgent.stdout.strip())["JobState"] == "COMPLETED", told, timeout_s=DEADLINE_S)
    saved = max(int(path.name[5:]) for path in run.glob("checkpoints/step=*"))
    assert saved >= 2
    wait_until(lambda: has_step(saved + 2), told, timeout_s=DEADLINE_S)
    assert slurm.job(job)["Restarts"] == "1"

    assert slurm.run("scancel", "--batch", "--signal=TERM", job).returncode == 0
    wait_until(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), told, timeout_s=DEADLINE_S)
    assert slurm.job(job)["ExitCode"] == "130:0", told()
    assert steps_of(run) == list(range(1, len(steps_of(run)) + 1)), "no step is missing or repeated"
    assert f"resumed from step {saved}" in log.read_text(), told()


def nodes_in(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if "Local node IP" in line]


def test_two_runs_share_a_node_and_one_of_them_is_in_an_image(
    slurm: Slurm, config: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "apptainer").write_text(APPTAINER)
    (tmp_path / "apptainer").chmod(0o755)
    (tmp_path / "image.sif").touch()
    calls = tmp_path / "calls"
    options = ("--follow", "--sbatch", "--nodelist=node1 --mem=400 --cpus-per-task=1")
    image = {"RAYAPP_IMAGE": "image.sif", "RAYAPP_APPTAINER_ARGS": "--nv", "APPTAINER_CALLS": str(calls)}
    plain, contained = config("plain", 1), config("contained", 1)

    with ThreadPoolExecutor() as pool:
        outside = pool.submit(submit, slurm, plain, *options)
        inside = pool.submit(submit, slurm, contained, *options, "--python", sys.executable, **image)

    assert outside.result().returncode == 0, outside.result().stdout + outside.result().stderr
    assert inside.result().returncode == 0, inside.result().stdout + inside.result().stderr
    assert steps_of(tmp_path / "plain") == steps_of(tmp_path / "contained") == [1]
    assert f"apptainer exec --pwd {tmp_path} --bind {tmp_path} --nv image.sif" in calls.read_text()


def test_a_run_that_fails_ends_the_command_with_its_exit_code(slurm: Slurm, config: Callable[..., Path]) -> None:
    file = config("failing", 1)

    done = submit(slurm, file, "model.path=/nowhere", "--follow")

    assert done.returncode == 2, done.stdout + done.stderr
    refused = submit(slurm, file, "--sbatch", "--partition=none")
    assert refused.returncode == 1
    assert "invalid partition specified: none" in refused.stderr
