"""Supervised steps as a run: killed, they go on as if nothing had happened, and a training starts from their model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SCRIPTED = ROOT / "tests" / "data" / "train_with_scripted_servers.py"
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
        "optimizer": {"lr": 3e-3},
    }
    config = short_run(folder / "outputs", warmup=warmup, train={"num_steps": 1}, learner={"optimizer": {"lr": 1e-30}})
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def start(config_file: Path, name: str, *command: str) -> subprocess.Popen[str]:
    head = [sys.executable, *(command or ("-m", "rayapp", "sft"))]
    return subprocess.Popen(
        [*head, str(config_file), f"run.name={name}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, output
    return output


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


@pytest.fixture(scope="module")
def whole(config_file: Path) -> Path:
    """A run that nothing interrupted."""
    output = finish(start(config_file, "whole"))
    assert "supervised steps on 7 demonstrations" in output
    return folder_of(config_file, "whole")


def test_the_loss_falls_and_is_known_of_rows_held_out_before_and_after(whole: Path) -> None:
    found = records(whole)
    assert sorted(found) == list(range(NUM_STEPS + 1))
    assert found[NUM_STEPS]["sft/loss"] < 0.5 * found[1]["sft/loss"]
    assert {step for step, record in found.items() if "sft/validation_loss" in record} == {0, NUM_STEPS}
    assert (whole / "rewards.png").stat().st_size > 5_000


def test_a_killed_run_goes_on_as_if_nothing_had_happened(config_file: Path, whole: Path) -> None:
    process, folder = start(config_file, "killed"), folder_of(config_file, "killed")
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "checkpoints" / "step=000002" / "manifest.json").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(start(config_file, "killed"))
    assert records(folder) == records(whole)
    assert weights(folder) == weights(whole)


def test_a_training_starts_from_the_model_that_its_warmup_ended_with(config_file: Path) -> None:
    output = finish(start(config_file, "both", str(SCRIPTED)))
    assert "step 1/1" in output
    assert output.count("connecting to Ray") == 1, "the warm-up and the training share a connection"
    # The training's learning rate moves nothing.
    assert weights(config_file.parent / "outputs" / "both") == weights(folder_of(config_file, "both"))
    again = finish(start(config_file, "both", str(SCRIPTED)))
    assert "has its 1 steps" in again
