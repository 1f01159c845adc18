"""Runs as jobs of a real Ray head, with and without tokens: status, log, metrics, and a stop that loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.k8s.examples import render_example
from rayapp.tracking.dashboard import ROWS, queries

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
TOKEN = "a-token-of-forty-characters-for-the-tests"
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Head:
    """A Ray head of this test's own."""

    address: str
    metrics_port: int
    environment: dict[str, str]

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    def rayapp(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "rayapp", *arguments, "--address", self.address, **environment)


@pytest.fixture(scope="module", params=["disabled", "token"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    yield from started_head(request.param, tmp_path_factory.mktemp("home"))


def started_head(auth: str, home: Path) -> Iterator[Head]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"HOME": str(home), "RAY_AUTH_MODE": auth, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    # On a machine with other work Ray gives itself up for dead: its agent has 30 s to start, and a few to answer.
    environment |= {"RAY_agent_register_timeout_ms": "600000", "RAY_health_check_timeout_ms": "120000"}
    # `python` of the entrypoint is the one of this environment.
    environment["PATH"] = f"{RAY.parent}{os.pathsep}{os.environ['PATH']}"
    if auth == "token":
        environment["RAY_AUTH_TOKEN"] = TOKEN
    gcs, dashboard, metrics, client, agent = free_ports(5)
    # Short: the paths of Ray's sockets have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="rj", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [
            str(RAY), "start", "--head", "--block", f"--port={gcs}", f"--dashboard-port={dashboard}",
            f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}",
            f"--dashboard-agent-listen-port={agent}", f"--temp-dir={folder}", "--num-cpus=4",
            "--object-store-memory=300000000", "--node-ip-address=127.0.0.1",
        ]  # fmt: skip
        with Path(folder, "start.log").open("w") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            head = Head(f"http://127.0.0.1:{dashboard}", metrics, environment)
            until(lambda: is_ready(head), "no Ray:", process, why=Path(folder, "start.log").read_text)
            yield head
        finally:
            end(process, folder)


def end(process: subprocess.Popen[bytes], folder: str) -> None:
    """End this Ray and nothing else: its processes name its folder."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if folder.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def is_ready(head: Head) -> bool:
    request = urllib.request.Request(f"{head.address}/api/jobs/", headers={"Authorization": f"Bearer {TOKEN}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def until(
    condition: Callable[[], bool],
    failure: str,
    process: subprocess.Popen[bytes] | None = None,
    why: Callable[[], str] = str,
) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process is None or process.poll() is None, f"{failure} {why()}"
        assert time.monotonic() < deadline, f"{failure} {why()}"
        time.sleep(0.5)


def test_plain_ray_job_submit_runs_the_main_program(head: Head) -> None:
    done = head.run(
        str(RAY), "job", "submit", "--address", head.address, "--working-dir", ".", "--runtime-env",
        "runtime_env/job.yaml", "--", "python", "-m", "rayapp", "config", "show", "configs/coding_cpu.yaml",
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert "models/smollm2-135m" in done.stdout


def test_rendered_rayjob_runs_as_its_sidecar_would_run_it(head: Head, tmp_path: Path) -> None:
    # The entrypoint and runtimeEnvYAML of the manifest, with the config where the pod would have it, and a command
    # that stops before it needs GPUs: an unknown model is refused first.
    files = render_example("single-node-ack")
    spec = yaml.safe_load(files["rayjob.yaml"])["spec"]
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_load(files["configmap.yaml"])["data"]["run.yaml"])
    entrypoint = spec["entrypoint"].replace("/var/configs/run.yaml", str(config)).replace("/var/outputs", str(tmp_path))

    done = head.run(
        "bash", "-c", f"{RAY} job submit --address {head.address} --runtime-env-json "
        f"'{json.dumps(yaml.safe_load(spec['runtimeEnvYAML']))}' -- {entrypoint}",
    )  # fmt: skip

    assert "error: model.path '/var/models/Qwen2.5-Coder-3B-Instruct'" in done.stdout + done.stderr
    assert done.returncode == 1


def test_wrong_token_and_a_wrong_port_are_named(head: Head, tmp_path: Path) -> None:
    command = ["submit", "configs/coding_cpu.yaml", f"run.output_dir={tmp_path}", "model.path=hub/model"]

    if head.environment["RAY_AUTH_MODE"] == "token":
        refused = head.rayapp(*command, RAY_AUTH_TOKEN="wrong")
        assert refused.returncode == 2
        assert re.match(r"error: http://\S+ refuses the token \(.+\)\. Set RAY_AUTH_MODE=token and", refused.stderr)
    nowhere = head.run(sys.executable, "-m", "rayapp", *command, "--address", "http://127.0.0.1:1")
    assert nowhere.returncode == 2
    assert nowhere.stderr.startswith("error: no Ray dashboard answers at http://127.0.0.1:1 ")


def test_job_that_can_not_start_fails_with_its_own_message(head: Head, tmp_path: Path) -> None:
    done = head.rayapp(
        "submit", "configs/coding_cpu.yaml", f"run.output_dir={tmp_path}", "model.path=/not/there", "--follow"
    )

    assert done.returncode == 1, done.stdout + done.stderr
    assert "error: model.path '/not/there'" in done.stdout
    assert done.stderr.splitlines()[-1].endswith(": FAILED")


def test_stopped_job_has_the_time_to_save(head: Head, tmp_path: Path) -> None:
    program = ROOT / "tests" / "data" / "slow_save.py"
    submitted = head.run(
        str(RAY), "job", "submit", "--no-wait", "--submission-id", "slow", "--address", head.address, "--working-dir",
        ".", "--runtime-env", "runtime_env/job.yaml", "--", "python", str(program), str(tmp_path),
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    until(lambda: "training" in get(f"{head.address}/api/jobs/slow/logs"), "the job does not start")

    stopped = head.rayapp("stop", "slow", "--timeout-s", "120")

    assert stopped.stdout == "slow: STOPPED\n", stopped.stdout + stopped.stderr
    assert (tmp_path / "slow" / "checkpoints" / "step=000003" / "manifest.json").exists()


@dataclass(frozen=True)
class Training:
    """A run that trains as a job until a test stops it."""

    head: Head
    file: Path
    job: str
    run: Path

    def details(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(get(f"{self.head.address}/api/jobs/{self.job}"))
        return answer

    def ray_job(self, command: str) -> str:
        return self.head.run(str(RAY), "job", command, "--address", self.head.address, self.job).stdout


@pytest.fixture(scope="module")
def training(tiny_model: Path, letter_tasks: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    outputs = tmp_path_factory.mktemp("outputs")
    config = {
        "run": {"name": "jobs", "output_dir": str(outputs)},
        "model": {"path": str(tiny_model)},
        "tasks": letter_tasks,
        "cluster": {"device": "cpu"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16},
        "train": {"num_steps": 5000, "groups_per_step": 2},
        "learner": {"max_tokens_per_microbatch": 256, "compute_dtype": "float32"},
        "server": {"kv_cache_gib": 1},
        "checkpoint": {"every_steps": 0},
    }
    # Below the folder that is uploaded.
    folder = Path(tempfile.mkdtemp(prefix="job-test-", dir=ROOT / "configs"))
    try:
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(config))
        with contextlib.contextmanager(started_head)("token", tmp_path_factory.mktemp("home")) as head:
            submitted = head.rayapp("submit", str(file))
            assert submitted.returncode == 0, submitted.stderr
            training = Training(head, file, submitted.stdout.strip(), outputs / "jobs")
            until(lambda: steps(training.run) >= 2 or training.details()["status"] == "FAILED", "no step in 15 minutes")
            assert steps(training.run) >= 2, training.ray_job("logs")
            yield training
    finally:
        (folder / "run.yaml").unlink()
        folder.rmdir()


def test_second_job_of_the_same_run_is_refused(training: Training) -> None:
    again = training.head.rayapp("submit", str(training.file))

    assert again.returncode == 2
    assert f"run 'jobs' is running on this cluster already, as job {training.job}" in again.stderr


def test_metadata_of_the_job_has_the_runs_name_and_config(training: Training) -> None:
    details = training.details()

    assert details["metadata"]["run_name"] == "jobs"
    assert yaml.safe_load(details["metadata"]["config"])["train"]["num_steps"] == 5000


REMOTE_ONLY = re.compile(r"rl_sandbox_(alive|limit|created|failures|strays)|rl_failed_share{|rl_failed_share\b(?!_10)")
"""Nothing to draw while sandboxes are local and nothing fails; their queries must be valid all the same."""


def test_every_panel_draws_what_prometheus_scrapes(training: Training, tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not here: apt-get install prometheus")
    exprs = [expr for _, panels in ROWS for panel in panels for expr, _, _ in queries(panel)]
    filled = [expr.replace("$run", "jobs").replace("$cluster", ".*") for expr in exprs]
    [port] = free_ports(1)
    (tmp_path / "alerts.yaml").write_text((ROOT / "configs" / "monitoring" / "alerts.yaml").read_text())
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 2s, evaluation_interval: 2s}\nrule_files: [alerts.yaml]\nscrape_configs:\n"
        f"  - {{job_name: ray, static_configs: [{{targets: ['127.0.0.1:{training.head.metrics_port}']}}]}}\n"
    )
    process = subprocess.Popen(
        [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: not empty(port, filled), "panels without data", process, why=lambda: str(empty(port, filled)))
        rules = json.loads(get(f"http://127.0.0.1:{port}/api/v1/rules"))["data"]["groups"][0]["rules"]
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert {rule["health"] for rule in rules} == {"ok"}


def empty(port: int, exprs: list[str]) -> list[str]:
    """Queries that Prometheus answers with nothing though this run has what they ask for."""
    return [expr for expr in exprs if not REMOTE_ONLY.search(expr) and not answers(port, expr)]


def answers(port: int, expr: str) -> bool:
    try:
        answer = json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expr)}"))
    except OSError:
        return False  # not up yet
    assert answer["status"] == "success", answer
    return any(result["value"][1] != "NaN" for result in answer["data"]["result"])


def test_stopped_job_saves_its_steps_and_leaves_no_actor(training: Training) -> None:
    head, run = training.head, training.run

    stopped = head.rayapp("stop", training.job, "--timeout-s", "240")

    assert stopped.stdout == f"{training.job}: STOPPED\n", stopped.stdout + stopped.stderr + training.ray_job("logs")
    done = steps(run)
    manifest = json.loads((run / "checkpoints" / f"step={done:06d}" / "manifest.json").read_text())
    assert manifest["version"] == done
    assert manifest["files"]
    assert not list((run / "checkpoints").glob(".pending-*"))
    assert alive_actors(head) == []


def alive_actors(head: Head) -> list[str]:
    """Names of the actors that live, but for those that Ray has for its jobs."""
    listed = head.run(
        str(RAY), "list", "actors", "--address", head.address, "--filter", "state=ALIVE", "--format", "json"
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    if listed.stdout == "No resource in the cluster\n":
        return []  # Ray's word for an empty list, whatever the format
    return [actor["name"] for actor in json.loads(listed.stdout) if not actor["class_name"].startswith("Job")]


def steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def get(url: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())
