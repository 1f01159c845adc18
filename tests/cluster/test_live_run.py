"""A run that trains as a job of a real Ray head with a token: what an operator sees, and a stop that loses nothing.

One run for all tests of this file; the last of them stops it.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from scripts.monitoring.dashboard import ROWS, queries
from support.stubs.e2b_stub import API_KEY, E2BStub
from support.stubs.faults import Faults
from support.whole_runs import records

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")


class SlowToRun(Faults):
    """Whatever runs in a sandbox takes seconds longer: the run spends its time waiting, as a large one does, and not
    the processor of the tests that look at it."""

    def choose(self, call: str) -> str:
        return "slow" if call == "start" else super().choose(call)


@dataclass(frozen=True)
class Training:
    """A run that trains as a job until a test stops it."""

    head: Any
    file: Path
    job: str
    run: Path
    sandboxes: E2BStub
    follower: subprocess.Popen[str]
    """`rayapp submit --follow`, until a test interrupts it."""
    followed: Path
    """What it writes to standard output."""

    def details(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.head.get(f"/api/jobs/{self.job}"))
        return answer

    def ray_job(self, command: str) -> str:
        return self.head.run(str(RAY), "job", command, "--address", self.head.address, self.job).stdout


@contextlib.contextmanager
def following(head: Any, config: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    """The program that submits a run and follows it."""
    command = [sys.executable, "-m", "rayapp", "submit", str(config), "--address", head.address, "--follow"]
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, cwd=ROOT, env=head.environment, stdout=file, stderr=subprocess.PIPE, text=True
        ) as follower,
    ):
        try:
            yield follower
        finally:
            follower.kill()


def job_of(follower: subprocess.Popen[str]) -> str:
    """The job's name in the command of Ray, which is the first line."""
    assert follower.stderr is not None
    command = follower.stderr.readline()
    found = re.search(r"--submission-id (\S+)", command)
    assert found is not None, command
    return found[1]


def remote_sandboxes(url: str) -> dict[str, Any]:
    """Some are always there, also between two steps. Nobody but the run itself ends them within a test."""
    provider = {"type": "e2b", "api_url": url, "sandbox_url": url, "max_sandboxes": 6, "creations_per_s": 50}
    return {"providers": [provider], "min_ready": 3, "max_uses": 20}


@pytest.fixture(scope="module")
def sandboxes() -> Iterator[E2BStub]:
    stub = E2BStub(faults=SlowToRun(slow_s=2.0))
    with stub.running_in_thread():
        yield stub


@pytest.fixture(scope="module")
def training(
    tiny_run: Callable[..., dict[str, Any]], start_head: Any, sandboxes: E2BStub,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Training]:  # fmt: skip
    outputs = tmp_path_factory.mktemp("outputs")
    config = tiny_run("jobs", outputs) | {"tracking": {"log_format": "json"}}
    config["sandbox"] = remote_sandboxes(sandboxes.url)
    # Below the folder that is uploaded.
    folder = Path(tempfile.mkdtemp(prefix="job-test-", dir=ROOT / "configs"))
    try:
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(config))
        with (
            start_head("token", variables={"E2B_API_KEY": API_KEY}) as head,
            following(head, file, outputs / "followed.log") as follower,
        ):
            job = job_of(follower)
            training = Training(head, file, job, outputs / "jobs", sandboxes, follower, outputs / "followed.log")
            # Three, so that what belongs to the first two is in the logs.
            head.until(lambda: job in head.get("/api/jobs/"), lambda: "no job")
            head.until(lambda: steps(training.run) >= 3 or training.details()["status"] == "FAILED", lambda: "no step")
            assert steps(training.run) >= 3, training.ray_job("logs")
            yield training
    finally:
        (folder / "run.yaml").unlink()
        folder.rmdir()


def test_ctrl_c_ends_the_following_and_not_the_job(training: Training) -> None:
    training.head.until(
        lambda: "  2/5000  reward " in training.followed.read_text(), lambda: "the log is not passed on"
    )
    before = steps(training.run)

    training.follower.send_signal(signal.SIGINT)
    assert training.follower.wait(timeout=600) == 130

    training.head.until(lambda: steps(training.run) >= before + 2, lambda: "the run stands still")


def test_run_of_the_same_name_elsewhere_is_refused_and_the_first_goes_on(training: Training, tmp_path: Path) -> None:
    # Not as a job, and with a folder of its own: only the cluster can know.
    before = steps(training.run)
    program = [sys.executable, "-m", "rayapp", "train", str(training.file), f"run.output_dir={tmp_path}"]

    refused = training.head.run(*program, RAY_ADDRESS=training.head.gcs)

    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "already runs in namespace rayapp-jobs of this Ray: another run has the same run.name" in refused.stderr
    training.head.until(lambda: steps(training.run) >= before + 2, lambda: "the first run stands still")


def test_lines_of_the_log_are_json_that_names_run_step_and_group(training: Training) -> None:
    driver = json_lines([training.ray_job("logs")])
    logs = training.head.folder / "session_latest" / "logs"
    actors = json_lines([path.read_text(errors="replace") for path in logs.glob("worker-*.err")])

    done = [line for line in driver if line["message"].startswith("step ")]
    assert done[0]["run"] == "jobs"
    of_actor = {name: [line for line in actors if line.get("actor_name") == name] for name in ACTORS}
    groups = [line for line in of_actor["rollout-worker-0"] if "group" in line]
    # Two groups a step, in the order of their ids.
    assert {(line["run"], line["step"]) for line in groups if line["group"] in (2, 3)} == {("jobs", 2)}
    trained = [line["step"] for line in of_actor["learner-0"] if line["message"].startswith("trained on 2 groups")]
    held = [line["step"] for line in of_actor["vllm-server-0"] if line["message"].startswith("holds policy version")]
    assert trained[:2] == [1, 2]
    assert held[:3] == [0, 1, 2]


def json_lines(texts: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for text in texts for line in text.splitlines() if line.startswith('{"')]


ACTORS = ("learner-0", "rollout-worker-0", "sandbox-pool", "vllm-server-0")


def test_trajectories_hold_what_engine_and_learner_thought_of_each_sampled_token(training: Training) -> None:
    rows = [row for file in sorted((training.run / "trajectories").glob("step=*.parquet")) for row in rows_of(file)]
    trained = [row for row in rows if row["learner_log_probs"] is not None]

    assert trained
    for row in trained:
        mask = np.array(row["response_mask"])
        engine, learner = (np.exp(row[name])[mask] for name in ("rollout_log_probs", "learner_log_probs"))
        # bfloat16 against float32 in a model of 95 letters: a choice of 1 in 95 is the same to a few percent of it.
        assert np.abs(engine - learner).max() < 0.01
        assert np.array(row["learner_log_probs"])[~mask].any() == np.False_


def rows_of(file: Path) -> list[dict[str, Any]]:
    columns = ["response_mask", "rollout_log_probs", "learner_log_probs"]
    rows: list[dict[str, Any]] = pq.read_table(file, columns=columns, partitioning=None).to_pylist()
    return rows


def test_dashboard_names_what_runs_and_in_which_step(training: Training) -> None:
    alive = training.head.listed("actors", "--filter", "state=ALIVE")
    actors = {actor["name"]: actor["repr_name"] for actor in alive}
    groups = [group["name"] for group in training.head.listed("placement-groups")]
    tasks = {re.sub(r"\d+$", "N", re.sub(r"(=)\d+", r"\1N", task["name"])) for task in training.head.listed("tasks")}

    assert actors.items() >= {name: name for name in ACTORS if name != "sandbox-pool"}.items()
    assert actors["sandbox-pool"] == "sandbox-pool(jobs)"
    assert "jobs: servers and learners" in groups
    assert tasks >= {
        "rollout-worker-0.run_group step=N group=N",
        "vllm-server-0.generate group=N/trajectory=N",
        "learner-0.train_step step=N",
        "learner-0.export_weights step=N",
        "vllm-server-0.load_weights step=N",
    }


NOTHING_TO_REPORT = re.compile(r"rl_sandbox_(failures|strays)|rl_failed_share$|rl_mfu")
"""Metrics of failures, of which there are none, and of a GPU's peak."""


def test_ray_exports_every_metric_that_the_dashboard_draws(training: Training) -> None:
    exprs = [expr for _, panels in ROWS for panel in panels for expr, _, _ in queries(panel)]
    drawn = {name for expr in exprs for name in re.findall(r"\bray_rl_\w+", expr)}
    expected = {name for name in drawn if not NOTHING_TO_REPORT.search(name)}

    def missing() -> set[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{training.head.metrics_port}/metrics", timeout=60) as answer:
            return expected - set(re.findall(r"^(ray_rl_\w+)\{", answer.read().decode(), re.MULTILINE))

    training.head.until(lambda: not missing(), lambda: f"not exported: {missing()}")


OF_RAY = {"JobSupervisor", "_StatsActor"}
"""Actors of Ray's own dashboard; the second comes when somebody looks at a job."""


def test_stopped_job_saves_its_steps_ends_its_remote_sandboxes_and_leaves_no_actor(training: Training) -> None:
    head, run = training.head, training.run
    assert training.sandboxes.boxes.living

    training.ray_job("stop")

    # What is alive now would have outlived the time that Ray gives a stopped job: it has ended.
    left = list(training.sandboxes.boxes.living)
    assert training.details()["status"] == "STOPPED", training.ray_job("logs")
    assert left == []
    done = steps(run)
    manifest = json.loads((run / "checkpoints" / f"step={done:06d}" / "manifest.json").read_text())
    assert manifest["version"] == done
    assert manifest["files"]
    assert not list((run / "checkpoints").glob(".pending-*"))
    alive = head.listed("actors", "--filter", "state=ALIVE")
    assert [actor["name"] for actor in alive if actor["class_name"] not in OF_RAY] == []


def steps(run: Path) -> int:
    return len(records(run))
