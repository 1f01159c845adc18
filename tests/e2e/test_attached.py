"""On a Ray that runs already: two learners, two rollout workers, every correction on; ended by SIGTERM, gone on with,
finished. That Ray is as alive and as empty afterwards as before."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.config.config import Config
from rayapp.runs.folder import RunFolder

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3000)]
ROOT = Path(__file__).parents[2]
DEADLINE_S = 1200.0
NUM_STEPS = 4
LOOK = """
import json, sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR")
named = ray.util.list_named_actors(all_namespaces=True)
answer = ray.get(ray.remote(num_cpus=0)(lambda: 41 + 1).remote(), timeout=100)
print(json.dumps({"actors": [actor["name"] for actor in named], "answer": answer}))
"""


@dataclass
class RunningRay:
    address: str

    def look(self) -> dict[str, Any]:
        """Names of its living actors, and the answer of a task that it runs."""
        command = [sys.executable, "-c", LOOK, self.address]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # Ray starts its workers at nice 15: beside another test they would get a tenth of the processor.
    kept |= {"RAY_worker_niceness": "0"}
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_AUTH_MODE": "disabled"}
    return kept | own | {"PYTHONPATH": str(ROOT)} | changes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def running_ray(tmp_path: Path, descendants: Callable[[], dict[int, str]]) -> Iterator[RunningRay]:
    """What `ray start --head` makes, on ports of its own."""
    log = tmp_path / "ray.log"
    while True:
        port, head = start_head(log)
        try:
            while "--block" not in log.read_text() and head.poll() is None:
                time.sleep(0.05)
            if head.poll() is None:
                yield RunningRay(f"127.0.0.1:{port}")
                return
        finally:
            stop(head)
        # The node has 30 s to start, which nothing changes: on a busy machine it takes several tries.
        assert "timed out during startup" in log.read_text(), log.read_text()


def start_head(log: Path) -> tuple[int, subprocess.Popen[bytes]]:
    port = free_port()
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        # Short: a Unix socket's path has to fit in 107 bytes.
        f"--temp-dir=/tmp/ra{os.getpid()}", "--num-cpus=4", "--num-gpus=0", "--object-store-memory=200000000",
        "--include-dashboard=false", "--node-ip-address=127.0.0.1", f"--ray-client-server-port={free_port()}",
        "--disable-usage-stats",
    ]  # fmt: skip
    with log.open("w") as sink:
        return port, subprocess.Popen(command, env=environment(), stdout=sink, stderr=sink, start_new_session=True)


def stop(head: subprocess.Popen[bytes]) -> None:
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(head.pid, signal.SIGKILL)


def wait_until(reached: Callable[[], bool], may_go_on: Callable[[], bool], output: Callable[[], str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert may_go_on(), output()
        assert time.monotonic() < deadline, output()
        time.sleep(0.05)


def start(config: Path, address: str, log: Path, *overrides: str) -> subprocess.Popen[str]:
    with log.open("w") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "rayapp", "train", str(config), *overrides],
            stdout=sink,
            stderr=sink,
            text=True,
            cwd=ROOT,
            env=environment(RAY_ADDRESS=address),
            start_new_session=True,
        )


def records(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def our_processes(running: dict[int, str]) -> list[str]:
    """Those that a run starts: actors, the zygote and its sandboxes. Ray keeps its idle workers."""
    ray_itself = (
        "ray::IDLE",
        "raylet",
        "gcs_server",
        "/ray/",
        "ray.scripts.scripts",
        "ray-dashboard",
        "ray.util.client",
        "ray::DashboardAgent",
        "ray::RuntimeEnvAgent",
        "default_worker",
    )
    return [line for line in running.values() if not any(name in line for name in ray_itself)]


def test_two_learners_on_a_running_ray_are_ended_by_sigterm_go_on_and_finish(
    tmp_path: Path,
    short_run: Callable[..., dict[str, Any]],
    running_ray: RunningRay,
    descendants: Callable[[], dict[int, str]],
    settled: Callable[..., dict[int, str]],
) -> None:
    config = short_run(
        tmp_path,
        train={"num_steps": 1_000_000, "max_staleness": 1},
        rollout={"num_workers": 2},
        learner={"num_learners": 2},
        algorithm={
            "kl_loss_coef": 0.01,
            "kl_loss_type": "k3",
            "entropy_coef": 0.001,
            "rollout_correction": {"level": "token", "threshold": 2.0},
        },
    )
    file, log, folder = tmp_path / "config.yaml", tmp_path / "log", tmp_path / "run"
    file.write_text(yaml.safe_dump(config))

    # When it is told to end in the middle of a step
    process = start(file, running_ray.address, log)
    try:
        wait_until(lambda: len(records(folder)) >= 3, lambda: process.poll() is None, log.read_text)
        busy = running_ray.look()
        assert {"learner-0", "learner-1", "rollout-worker-0", "rollout-worker-1"} <= set(busy["actors"])
        assert len(our_processes(descendants())) > 0
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()

    # Then only that Ray is left, and a whole checkpoint
    assert code == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert running_ray.look() == {"actors": [], "answer": 42}
    assert our_processes(settled(lambda: dict(enumerate(our_processes(descendants()))))) == []
    with RunFolder.open(Config.model_validate(config)) as opened:
        checkpoint = opened.latest_checkpoint()
    assert checkpoint is not None

    # And when the same command goes on, it finishes
    last = checkpoint.version + NUM_STEPS
    process = start(file, running_ray.address, log, f"train.num_steps={last}")
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()
    found = records(folder)
    assert [record["step"] for record in found] == list(range(1, last + 1))
    assert all(math.isfinite(value) for record in found for value in record.values())
    assert found[-1]["learner/kl_to_reference"] > 0.0  # the reference is the model that training began with
    assert any(key.startswith("rollout_corr/") for key in found[-1]), sorted(found[-1])
    assert max(record["staleness/max"] for record in found) == 1.0
    assert (folder / "final" / "model.safetensors").exists()
    assert running_ray.look() == {"actors": [], "answer": 42}
