"""Supervised steps as a run: killed, they go on as if nothing had happened, and a training starts from their model."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS, DEADLINE_S = 6, 600.0
REPEATED = ("sft/", "learner/")


@pytest.fixture(scope="module")
def config_file(short_run: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    rows = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(10)]
    for name, chosen in (("learned.jsonl", rows[:7]), ("held_out.jsonl", rows[7:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in chosen))
    warmup = {
        "num_steps": NUM_STEPS,
        "rows_per_step": 3,
        "files": [str(folder / "learned.jsonl")],
        "eval_files": [str(folder / "held_out.jsonl")],
        "lr": 3e-3,
    }
    exact = {"checkpoint": {"final_dtype": "float32"}, "learner": {"optimizer": {"lr": 1e-30}}}
    config = short_run(folder / "outputs", warmup=warmup, train={"num_steps": 1}, **exact)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.fixture(scope="module")
def log(config_file: Path) -> Path:
    return config_file.parent / "log"


@pytest.fixture(scope="module")
def sft(standing_ray: Any, config_file: Path, log: Path) -> Callable[[], subprocess.Popen[str]]:
    """The supervised steps alone, of a run that is killed."""
    return lambda: standing_ray.run("-m", "rayapp", "sft", str(config_file), "run.name=killed", log=log)


@pytest.fixture(scope="module")
def train(standing_ray: Any, config_file: Path, log: Path) -> Callable[[], subprocess.Popen[str]]:
    """A training with its warmup."""
    return lambda: standing_ray.train(str(config_file), "run.name=both", log=log)


def finish(process: subprocess.Popen[str], log: Path) -> str:
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()
    return log.read_text()


def folder_of(config_file: Path, name: str) -> Path:
    return config_file.parent / "outputs" / f"{name}-sft"


def records(folder: Path) -> dict[int, dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    found = [json.loads(line) for line in lines]
    assert len({record["step"] for record in found}) == len(found)
    return {
        record["step"]: {key: value for key, value in record.items() if key.startswith(REPEATED)} for record in found
    }


def weights(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


@dataclass(frozen=True)
class WarmedUp:
    """A training whose warmup nothing interrupted."""

    folder: Path
    whole: Path
    """Of the supervised steps alone."""
    output: str


@pytest.fixture(scope="module")
def warmed_up(train: Callable[[], subprocess.Popen[str]], config_file: Path, log: Path) -> WarmedUp:
    output = finish(train(), log)
    return WarmedUp(config_file.parent / "outputs" / "both", folder_of(config_file, "both"), output)


def test_the_loss_falls_and_is_known_of_rows_held_out_before_and_after(warmed_up: WarmedUp) -> None:
    found = records(warmed_up.whole)
    assert sorted(found) == list(range(NUM_STEPS + 1))
    assert found[NUM_STEPS]["sft/loss"] < 0.5 * found[1]["sft/loss"]
    assert {step for step, record in found.items() if "sft/validation_loss" in record} == {0, NUM_STEPS}
    assert (warmed_up.whole / "rewards.png").stat().st_size > 5_000


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    sft: Callable[[], subprocess.Popen[str]], config_file: Path, log: Path, standing_ray: Any, warmed_up: WarmedUp
) -> None:
    process, folder = sft(), folder_of(config_file, "killed")
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "checkpoints" / "step=000002" / "manifest.json").exists():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    standing_ray.wait_until_gone()
    assert "supervised steps on 7 demonstrations" in finish(sft(), log)
    assert records(folder) == records(warmed_up.whole)
    assert weights(folder) == weights(warmed_up.whole)


def test_a_training_starts_from_the_model_that_its_warmup_ended_with(
    train: Callable[[], subprocess.Popen[str]], log: Path, warmed_up: WarmedUp
) -> None:
    assert "step 1/1" in warmed_up.output
    assert warmed_up.output.count("connecting to Ray") == 1, "the warm-up and the training share a connection"
    # The training's learning rate moves nothing.
    assert weights(warmed_up.folder) == weights(warmed_up.whole)
    assert "has completed its 1 steps" in finish(train(), log)
