"""A Ray of the test's own, however busy the machine is, in this process or as a head with a dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.learners import save_moved
from support.ports import free_port
from support.timing import wait_until

ROOT = Path(__file__).parents[2]
RAY = Path(sys.executable).with_name("ray")
TOKEN = "a-token-of-forty-characters-for-the-tests"
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Head:
    """A Ray head of this test's own."""

    address: str
    gcs: str
    metrics_port: int
    environment: dict[str, str]
    folder: Path

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

    def get(self, path: str) -> str:
        """What the dashboard answers."""
        request = urllib.request.Request(self.address + path, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def listed(self, what: str, *options: str) -> list[dict[str, Any]]:
        """`ray list`, as the dashboard has it."""
        command = [str(RAY), "list", what, "--address", self.address, "--detail", "--format", "json", "--limit", "9000"]
        done = self.run(*command, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        if done.stdout == "No resource in the cluster\n":
            return []  # Ray's word for an empty list, whatever the format
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def until(self, condition: Callable[[], bool], failure: Callable[[], str]) -> None:
        """Raises AssertionError: the condition does not hold within 15 minutes of a busy machine."""
        wait_until(condition, failure, timeout_s=DEADLINE_S)


@pytest.fixture(scope="module")
def start_head(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., contextlib.AbstractContextManager[Head]]:
    """Call it with `disabled` or `token`: a head, asking for no token or one.

    `variables` are of its environment, and so of all that runs on it.
    """
    return lambda auth, **options: started_head(auth, tmp_path_factory.mktemp("home"), **options)


@contextlib.contextmanager
def started_head(auth: str, home: Path, variables: Mapping[str, str] | None = None) -> Iterator[Head]:
    """A head that answers, and ends with the block.

    Raises:
        AssertionError: it ended, or could not start within 15 minutes of a busy machine. With the logs that say why.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environment |= {"HOME": str(home), "RAY_AUTH_MODE": auth, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    # On a machine with other work Ray gives itself up for dead: its agent has 30 s to start, and a few to answer.
    environment |= {"RAY_agent_register_timeout_ms": "600000", "RAY_health_check_timeout_ms": "120000"}
    # Ray starts its workers at nice 15: on a machine with other work an engine would need minutes to start.
    environment |= {"RAY_worker_niceness": "0"}
    # `python` of the entrypoint is the one of this environment.
    environment["PATH"] = f"{RAY.parent}{os.pathsep}{os.environ['PATH']}"
    environment |= variables or {}
    if auth == "token":
        environment["RAY_AUTH_TOKEN"] = TOKEN
    deadline = time.monotonic() + DEADLINE_S
    # Short: the paths of Ray's sockets have 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="rj", dir="/tmp", ignore_cleanup_errors=True) as folder:
        while True:
            head, process, log = launch_head(environment, folder)
            try:
                while process.poll() is None and time.monotonic() < deadline and not is_ready(head):
                    time.sleep(0.5)
                if is_ready(head):
                    yield head
                    return
            finally:
                end(process, folder)
            # The node itself has 30 s to start, which nothing changes: on a busy machine it takes several tries.
            why = log.read_text() + agent_logs(folder)
            assert "timed out during startup" in why, why
            assert time.monotonic() < deadline, why


def launch_head(environment: dict[str, str], folder: str) -> tuple[Head, subprocess.Popen[bytes], Path]:
    gcs, dashboard, metrics, client, agent = (free_port() for _ in range(5))
    command = [
        str(RAY), "start", "--head", "--block", f"--port={gcs}", f"--dashboard-port={dashboard}",
        f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}", f"--temp-dir={folder}", "--num-cpus=4",
        "--object-store-memory=300000000", "--node-ip-address=127.0.0.1",
    ]  # fmt: skip
    log = Path(folder, f"start-{dashboard}.log")
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    head = Head(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}", metrics, environment, Path(folder))
    return head, process, log


def agent_logs(folder: str) -> str:
    """What Ray's agent wrote, which says more than Ray does about a node that did not start."""
    files = Path(folder, "session_latest", "logs").glob("dashboard_agent*.log")
    return "\n".join(file.read_text(errors="replace") for file in files)


def end(process: subprocess.Popen[bytes], folder: str) -> None:
    """End this Ray and nothing else: its processes name its folder."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=60)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if folder.encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def is_ready(head: Head) -> bool:
    try:
        head.get("/api/jobs/")
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def tiny_run(tiny_model: Path, letter_tasks: list[str]) -> Callable[[str, Path], dict[str, Any]]:
    """Call it with a run's name and where its folder goes: small steps on CPU, until somebody stops it."""
    return lambda name, outputs: {
        "run": {"name": name, "output_dir": str(outputs)},
        "model": {"path": str(tiny_model)},
        "tasks": letter_tasks,
        "cluster": {"device": "cpu"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_completion_tokens": 16},
        "train": {"num_steps": 5000, "groups_per_step": 2},
        "learner": {"max_tokens_per_microbatch": 256, "compute_dtype": "float32", "cpu_threads": 1},
        "server": {"kv_cache_gib": 0.1, "cpu_threads": 1},
        "checkpoint": {"every_steps": 0},
    }


@pytest.fixture(scope="session")
def until_started() -> Callable[[Callable[[], Any]], Any]:
    """Call it with what starts a Ray in this process: tried again where Ray's own 30 s were too few for its node."""
    import ray

    def started(start: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return start()
            except Exception as error:  # boundary: Ray raises a bare Exception
                ray.shutdown()
                if "timed out during startup" not in str(error) or time.monotonic() > deadline:
                    raise

    return started


@pytest.fixture(scope="module")
def moved_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in float32, four heads, with every weight moved as an optimizer step would."""
    return save_moved(tiny_model, tmp_path_factory.mktemp("moved"), noise=0.02, dtype="float32")


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., None]:
    """Call it with the text of a program that forks learners' ranks, and its arguments: it runs to its end."""

    def run(program: str, *arguments: object, timeout_s: float = 800.0) -> None:
        command = [sys.executable, "-c", program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def run_two_ranks() -> Callable[..., list[Any]]:
    """Call it with the text of a rank's program, whose arguments are rank, port and yours: what rank 0 prints after
    RESULT, a line each."""

    def run(program: str, *arguments: object, timeout_s: float) -> list[Any]:
        port = str(free_port())
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank), port, *map(str, arguments)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
        lines = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
        return [json.loads(line.removeprefix("RESULT ")) for line in lines]

    return run


@pytest.fixture
def references() -> Callable[[Iterable[Any]], list[asyncio.Future[Any]]]:
    """Values that are awaited, as Ray's references are."""

    def to(values: Iterable[Any]) -> list[asyncio.Future[Any]]:
        found = []
        for value in values:
            found.append(asyncio.get_running_loop().create_future())
            found[-1].set_result(value)
        return found

    return to
