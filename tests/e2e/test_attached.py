"""On a Ray that runs already: two learners, two rollout workers, every correction on; ended by SIGTERM, gone on with,
finished. That Ray is as alive and as empty afterwards as before.

The servers are scripted, as vLLM is not the subject: that an engine ends with its server is in
tests/cluster/test_vllm_server.py. With `-m long` they are the real ones."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayapp.config.config import Config
from rayapp.runs.folder import RunFolder
from support.whole_runs import records, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3000)]
DEADLINE_S = 1200.0
NUM_STEPS = 2


def our_processes(running: dict[int, str]) -> list[str]:
    """Those that a run starts: actors, the zygote and its sandboxes. Ray keeps its idle workers."""
    ray_itself = (
        "ray::IDLE", "raylet", "gcs_server", "/ray/", "ray.scripts.scripts", "ray-dashboard", "ray.util.client",
        "ray::DashboardAgent", "ray::RuntimeEnvAgent", "default_worker",
    )  # fmt: skip
    return [line for line in running.values() if not any(name in line for name in ray_itself)]


def test_two_learners_on_a_running_ray_are_ended_by_sigterm_go_on_and_finish(
    tmp_path: Path,
    short_run: Callable[..., dict[str, Any]],
    running_ray: Any,
    descendants: Callable[[], dict[int, str]],
    settled: Callable[..., dict[int, str]],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
    config["distillation"] = {"teacher": config["model"]["path"], "kl_over": "vocabulary"}
    file, log, folder = tmp_path / "config.yaml", tmp_path / "log", tmp_path / "run"
    file.write_text(yaml.safe_dump(config))

    # When it is told to end in the middle of a step
    process = running_ray.train(str(file), log=log)
    try:
        wait_until(lambda: len(records(folder)) >= 1, process, log.read_text, timeout_s=DEADLINE_S)
        # While this looks, it takes steps.
        assert {"learner-0", "learner-1", "rollout-worker-0", "rollout-worker-1"} <= set(running_ray.actors())
        assert len(our_processes(descendants())) > 0
        wait_until(lambda: len(records(folder)) >= 3, process, log.read_text, timeout_s=DEADLINE_S)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()

    # Then only that Ray is left, and a whole checkpoint
    assert code == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert running_ray.actors() == []
    assert running_ray.computes()
    assert our_processes(settled(lambda: dict(enumerate(our_processes(descendants()))))) == []
    with RunFolder.open(Config.model_validate(config)) as opened:
        checkpoint = opened.checkpoints.latest()
    assert checkpoint is not None

    # And when the same command goes on, it finishes
    last = checkpoint.version + NUM_STEPS
    process = running_ray.train(str(file), f"train.num_steps={last}", log=log)
    assert process.wait(timeout=DEADLINE_S) == 0, log.read_text()
    found = records(folder)
    assert [record["step"] for record in found] == list(range(1, last + 1))
    assert all(math.isfinite(value) for record in found for value in record.values())
    assert found[-1]["learner/kl_to_reference"] > 0.0  # the reference is the model that training began with
    assert found[-1]["distillation/kl"] > 0.0  # the teacher is that model too, and told what it thinks in every step
    assert any(key.startswith("rollout_corr/") for key in found[-1]), sorted(found[-1])
    assert max(record["staleness/max"] for record in found) == 1.0
    assert (folder / "rewards.png").stat().st_size > 10_000
    assert AutoModelForCausalLM.from_pretrained(folder / "final").config.num_hidden_layers == 2
    assert AutoTokenizer.from_pretrained(folder / "final").decode([72]) == "f"
    assert running_ray.actors() == []
    assert running_ray.computes()
