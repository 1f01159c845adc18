"""Runs as jobs of a real Ray head, with and without tokens: status, log, metrics, and a stop that loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rayapp.k8s.examples import render_example

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
            until(lambda: is_ready(head), f"no Ray: {Path(folder, 'start.log').read_text()}", process)
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


def until(condition: Callable[[], bool], failure: str, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process is None or process.poll() is None, failure
        assert time.monotonic() < deadline, failure
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


def test_stopped_job_saves_its_steps_and_reports_its_metrics(
    tiny_model: Path, letter_tasks: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = {
        "run": {"name": "jobs", "output_dir": str(tmp_path)},
        "model": {"path": str(tiny_model)},
        "tasks": letter_tasks,
        "cluster": {"device": "cpu"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16},
        "train": {"num_steps": 500, "groups_per_step": 2},
        "learner": {"max_tokens_per_microbatch": 256, "compute_dtype": "float32"},
        "server": {"kv_cache_gib": 1},
        "checkpoint": {"every_steps": 0},
    }
    folder = Path(tempfile.mkdtemp(prefix="job-test-", dir=ROOT / "configs"))
    try:
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(config))
        with contextlib.contextmanager(started_head)("token", tmp_path_factory.mktemp("home")) as head:
            check_stop(head, file, tmp_path / "jobs")
    finally:
        (folder / "run.yaml").unlink()
        folder.rmdir()


def check_stop(head: Head, file: Path, run: Path) -> None:
    submitted = head.rayapp("submit", str(file))
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()

    def status() -> str:
        return head.run(str(RAY), "job", "status", "--address", head.address, job).stdout

    def log() -> str:
        return head.run(str(RAY), "job", "logs", "--address", head.address, job).stdout

    until(lambda: steps(run) >= 2 or "FAILED" in status(), f"no step in time: {log()}")
    assert steps(run) >= 2, log()

    again = head.rayapp("submit", str(file))
    assert again.returncode == 2
    assert f"run 'jobs' is running on this cluster already, as job {job}" in again.stderr
    details = json.loads(get(f"{head.address}/api/jobs/{job}"))
    assert details["metadata"]["run_name"] == "jobs"
    assert yaml.safe_load(details["metadata"]["config"])["train"]["num_steps"] == 500
    names = ("ray_rl_step", "ray_rl_reward_mean", "ray_rl_server_running", "ray_rl_sandbox_leased",
             "ray_rl_sandbox_exec_seconds_bucket", "ray_rl_idle_share", "ray_rl_phase_seconds")  # fmt: skip
    until(lambda: not missing(head, names), f"not exported: {missing(head, names)}")

    stopped = head.rayapp("stop", job, "--timeout-s", "240")

    assert stopped.stdout == f"{job}: STOPPED\n", stopped.stdout + stopped.stderr + log()
    done = steps(run)
    manifest = json.loads((run / "checkpoints" / f"step={done:06d}" / "manifest.json").read_text())
    assert manifest["version"] == done
    assert manifest["files"]
    assert not list((run / "checkpoints").glob(".pending-*"))
    alive = head.run(
        str(RAY), "list", "actors", "--address", head.address, "--filter", "state=ALIVE", "--format", "json"
    )
    kept = [actor["name"] for actor in json.loads(alive.stdout) if not actor["class_name"].startswith("Job")]
    assert kept == []


def steps(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def get(url: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(answer.read().decode())


def missing(head: Head, names: tuple[str, ...]) -> list[str]:
    text = get(f"http://127.0.0.1:{head.metrics_port}/metrics")
    return [name for name in names if f"{name}{{" not in text]
