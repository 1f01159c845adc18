"""Runs from TRL's own GRPOConfig, in the real driver, workers and learners: weighted rewards, and an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayapp.core.types import Trajectory
from rayapp.runs.tracking.metrics import read_metrics
from rayapp.runs.trajectories import read_groups

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "data" / "train_from_trl.py"


def trajectories(run: Path) -> list[Trajectory]:
    return [each for group in read_groups(run / "trajectories") for each in group.trajectories]


def test_a_script_of_trl_trains_with_weighted_rewards_and_with_an_environment(
    chat_model: Path, standing_ray: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    # TRL's class imports PyTorch, which processes of the standing Ray don't find.
    done = standing_ray.run(str(PROGRAM), str(chat_model), str(tmp_path), log=log, PYTHONPATH=str(ROOT))
    assert done.wait(timeout=800) == 0, log.read_text()

    (answered,) = (tmp_path / "weighted").glob("*/metrics.jsonl")
    (played,) = (tmp_path / "played").glob("*/metrics.jsonl")
    for file in (answered, played):
        metrics = read_metrics(file)
        assert [record["step"] for record in metrics] == [1, 2]
        assert sum(record["learner/grad_norm"] for record in metrics) > 0
        assert (file.parent / "final" / "config.json").is_file()
    for each in trajectories(answered.parent):
        terms = each.reward.terms
        assert each.reward.value == terms["right"] + 0.5 * terms["short"]
    assert {each.reward.value for each in trajectories(answered.parent)} >= {0.0, 0.5}
    assert {each.reward.value for each in trajectories(played.parent)} == {0.0, 1.0}
    assert {each.num_turns for each in trajectories(played.parent)} == {1, 2}
