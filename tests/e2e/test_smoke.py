"""`rayapp train CONFIG --smoke`, whole, on a CPU: with a model that is not there, and servers that only say scripts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_steps_are_trained_and_measured_and_servers_without_the_weights_are_told(
    tmp_path: Path, short_run: Callable[..., dict[str, Any]], standing_ray: Any
) -> None:
    config, log = tmp_path / "config.yaml", tmp_path / "log"
    config.write_text(yaml.safe_dump(short_run(tmp_path, model={"path": "models/absent"}, train={"num_steps": 50})))

    training = standing_ray.run(*standing_ray.program, str(config), "--smoke", log=log)

    assert training.wait(timeout=600.0) == 1, log.read_text()  # scripted servers have other log-probs than learners
    (report,) = (json.loads(file.read_text()) for file in tmp_path.glob("*-smoke-*/smoke.json"))
    assert report["weights"] == "random weights of a small Llama, a tokenizer of words"
    assert [step["learner/grad_norm"] > 0 for step in report["steps"]] == [True, True]
    assert report["measured"].keys() >= {"tokens/s per GPU", "probability difference", "step, s", "train, s"}
    assert report["planned"].keys() == {"host memory, GiB"}
    (problem,) = report["problems"]
    assert "weight_transport" in problem
    assert problem in log.read_text()
