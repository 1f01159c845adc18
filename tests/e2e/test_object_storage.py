"""A run that lives in object storage alone: killed, its machine gone, resumed from s3:// with the same metrics."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from rayapp.core.errors import StorageNotFoundError
from rayapp.extras.s3.checkpoints import whole_checkpoints
from rayapp.storage.base import Storage
from rayapp.storage.folders import put_folder
from rayapp.storage.opening import open_storage
from rayapp.storage.settings import settings_from_environment

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

T = TypeVar("T")
BUCKET = "runs"
DEADLINE_S = 400.0
STEPS_AFTER_THE_KILL = 2
MEASURED = (
    "timing_s/", "throughput/", "weight_sync/", "time", "ledger/", "queue/", "routing/", "storage/", "recovery/",
)  # fmt: skip
"""What measures the clock, or counts from a start of the run."""


@pytest.fixture(scope="module")
def environment(s3_server: Any) -> Any:
    s3_server.make_bucket(BUCKET)
    return s3_server.environment


class Machine:
    """A place to train from: its folders can be lost, the bucket stays."""

    def __init__(self, folder: Path, environment: dict[str, str], config: dict[str, Any]) -> None:
        self._folder, self._environment = folder, environment
        self._settings = settings_from_environment(environment)
        config["run"] |= {"staging_dir": str(folder / "disk" / "staging"), "name": "r"}
        config["data"] = {"cache_dir": str(folder / "disk" / "cache")}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def run(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        """`rayapp COMMAND CONFIG ...` on this machine."""
        return subprocess.Popen(
            [sys.executable, "-m", "rayapp", command, str(self._folder / "config.yaml"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | self._environment,
            start_new_session=True,
        )

    def lose_the_disk(self) -> None:
        shutil.rmtree(self._folder / "disk")

    def ask(self, uri: str, call: Callable[[Storage], Awaitable[T]]) -> T:
        async def asked() -> T:
            async with open_storage(uri, settings=self._settings) as storage:
                return await call(storage)

        return asyncio.run(asked())

    def checkpoint(self, uri: str) -> int:
        """The newest whole one there; 0: none."""
        found = self.ask(uri, whole_checkpoints)
        return found[-1].version if found else 0

    def read(self, uri: str, key: str) -> bytes:
        return self.ask(uri, lambda storage: storage.get_bytes(key))


@pytest.fixture(scope="module")
def machine(
    environment: dict[str, str],
    short_run: Callable[..., dict[str, Any]],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Machine:
    folder = tmp_path_factory.mktemp("machine")
    config = short_run(folder, model={"path": f"s3://{BUCKET}/models/tiny"})
    config["run"]["output_dir"] = f"s3://{BUCKET}/team"
    machine = Machine(folder, environment, config)
    machine.ask(f"s3://{BUCKET}/models/tiny", lambda storage: put_folder(tiny_model, storage))
    return machine


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    return output


def kill_after_a_checkpoint(machine: Machine, uri: str) -> int:
    """Train until a checkpoint is in the bucket, then kill the driver. Returns the newest version there."""
    process = machine.run("train", "train.num_steps=100000")
    try:
        deadline = time.monotonic() + DEADLINE_S
        while machine.checkpoint(uri) == 0:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint has arrived"
            time.sleep(0.2)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    return machine.checkpoint(uri)


def records(metrics: bytes) -> list[dict[str, float]]:
    lines = (json.loads(line) for line in metrics.decode().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]


def test_a_run_whose_machine_is_lost_goes_on_from_the_bucket_alone_with_the_same_metrics(machine: Machine) -> None:
    uri = f"s3://{BUCKET}/team/r"
    version = kill_after_a_checkpoint(machine, uri)
    machine.lose_the_disk()
    num_steps = version + STEPS_AFTER_THE_KILL

    output = finish(machine.run("train", f"train.num_steps={num_steps}"))
    assert f"final model: {uri}/final" in output
    finish(machine.run("train", "run.output_dir=" + str(machine._folder / "local"), f"train.num_steps={num_steps}"))

    found = records(machine.read(uri, "metrics.jsonl"))
    expected = records((machine._folder / "local" / "r" / "metrics.jsonl").read_bytes())
    assert [record["step"] for record in found] == list(range(1, num_steps + 1))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs
    assert machine.checkpoint(uri) == num_steps
    for key in ("config.yaml", "rewards.png", "final/model.safetensors", "final/manifest.json"):
        assert machine.read(uri, key)
    assert machine.read(uri, f"trajectories/step={num_steps:06d}.parquet")
    with pytest.raises(StorageNotFoundError):
        machine.read(uri, f"trajectories/step={num_steps + 1:06d}.parquet")
    staging = machine._folder / "disk" / "staging"
    assert list(staging.iterdir()) == []  # all of it is in the bucket


def test_a_model_in_a_bucket_is_evaluated_by_the_command(machine: Machine) -> None:
    output = finish(machine.run("eval", "--samples", "2"))

    metrics = json.loads(output[output.index("{") :])
    assert metrics["groups/count"] == 2.0
    assert {"pass_at_1/first", "pass_at_2/second"} <= metrics.keys()
