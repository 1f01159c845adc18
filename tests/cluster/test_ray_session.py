"""A run's connection to a real Ray: two runs share none by accident; on SIGTERM the driver cleans up first, as on
Ctrl-C, whether the signal is for it alone or for its whole process group, and nothing of Ray prints stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.config.config import Config
from rayapp.runs.folder import RunFolder

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
from rayapp.config.config import Config
from rayapp.core.aio import run_until_done
from actors.own_ray import ray_session


async def main():
    with ray_session(Config.model_validate({"cluster": {"object_store_mib": 100, "dashboard": False}})) as session:
        assert session.dashboard_line() == "Ray has no dashboard"
        try:
            print("connected to its own" if session.is_own else "connected to another's", flush=True)
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.1)
            print("cleaned up", flush=True)


try:
    run_until_done(main())
except KeyboardInterrupt:
    sys.exit(130)
"""

TRAINING = """
import asyncio, sys
from pathlib import Path
from rayapp.driver.cluster import open_cluster
from support.stand_ins import stand_ins
from rayapp.config.loading import load_config
from rayapp.driver.loop import train_through_losses
from rayapp.core.aio import run_until_done
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.trackers import make_trackers


async def main(config):
    with RunFolder.open(config) as folder, make_trackers(config, folder) as tracker:
        async with open_cluster(config, stand_ins=stand_ins(completion_s=0.05, step_s=0.05)) as cluster:
            await train_through_losses(config, cluster, folder, tracker)


try:
    run_until_done(main(load_config(Path(sys.argv[1]), ())))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def environment(stand_in_engines: None) -> Iterator[dict[str, str]]:
    """Of a machine where nobody has called `ray start`, and on which two runs begin."""
    kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    kept["PYTHONPATH"] += f"{os.pathsep}{ROOT}{os.pathsep}{ROOT / 'tests'}"
    # Short: a Unix socket's path has to fit in 107 bytes.
    with tempfile.TemporaryDirectory(prefix="rs", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield kept | {"RAY_TMPDIR": folder}


def connected(environment: dict[str, str]) -> subprocess.Popen[str]:
    """A driver that has reached its Ray and waits."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    driver = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, text=True, **pipes)
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line == "connected to its own\n", (line, driver.communicate(timeout=600))
    return driver


@contextmanager
def training(config: dict[str, Any], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A run that has trained two steps, in a process group of its own; killed behind the block, if it has not ended."""
    file, metrics = folder / "config.yaml", folder / "run" / "metrics.jsonl"
    file.write_text(yaml.safe_dump(config))
    driver = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(file)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            assert driver.poll() is None, driver.communicate()
            time.sleep(0.02)
        yield driver
    finally:
        driver.kill()


SLOW_START = """
import os, signal, threading, time, psutil
from urllib.parse import urlsplit
from rayapp.config.config import Config
from actors.own_ray import ray_session

def hold():
    ends, held = time.monotonic() + 50, {}
    while time.monotonic() < ends:
        for each in psutil.Process().children(recursive=True):
            if each.pid not in held and ("raylet" in each.name() or "dashboard/agent.py" in " ".join(each.cmdline())):
                held[each.pid] = each
                each.suspend()
                threading.Timer(34, each.resume).start()
        time.sleep(0.05)

threading.Thread(target=hold, daemon=True).start()
with ray_session(Config.model_validate({"cluster": {"object_store_mib": 100}}), print) as session:
    import ray
    agent = ray._private.worker._global_node.dashboard_agent_listen_port
    assert urlsplit("//" + session.dashboard_url).port >= 8266, session.dashboard_url
    assert agent != 52365, agent
    print("it started")
"""


KILLED_RAYLET = """
import threading, time, psutil
from rayapp.config.config import Config
from actors.own_ray import ray_session

def kill_one():
    while True:
        for each in psutil.Process().children(recursive=True):
            if each.name() == "raylet":
                return each.kill()
        time.sleep(0.01)

threading.Thread(target=kill_one, daemon=True).start()
with ray_session(Config.model_validate({"cluster": {"object_store_mib": 100, "dashboard": False}}), print):
    print("it started")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (SLOW_START, "Ray has not started in 30 s; waiting for at most 300 s"),
        (KILLED_RAYLET, "Ray did not start: its raylet ended with status -9: "),
    ],
    ids=["it needs longer than its own limit, and leaves `ray start`'s ports free", "its raylet ends"],
)
def test_a_ray_that_does_not_come_up_at_once_is_waited_for_or_started_again(
    environment: dict[str, str], program: str, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600, check=False
    )

    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert done.stdout.endswith("it started\n")


def test_two_runs_of_a_machine_share_no_ray_and_sigterm_to_one_or_its_whole_group_ends_it_after_its_cleanup(
    tiny_run: Callable[[str, Path], dict[str, Any]], tmp_path: Path, environment: dict[str, str]
) -> None:
    config = tiny_run("run", tmp_path) | {"cluster": {"device": "cpu", "object_store_mib": 100, "dashboard": False}}
    with training(config, tmp_path, environment) as first:
        second = connected(environment)  # has read "its own" as well, beside the first one's Ray
        try:
            second.send_signal(signal.SIGTERM)
            output, errors = second.communicate(timeout=600)
        finally:
            second.kill()
        assert output == "cleaned up\n", errors
        assert second.returncode == 130, errors
        assert "SIGTERM received" not in errors
        assert first.poll() is None

        os.killpg(first.pid, signal.SIGTERM)  # as `timeout`, or a shell that ends its job
        output, _ = first.communicate(timeout=600)

    assert first.returncode == 130, output
    with RunFolder.open(Config.model_validate(config)) as opened:
        checkpoint = opened.checkpoints.latest()
    assert checkpoint is not None, output
    assert checkpoint.version >= 2
