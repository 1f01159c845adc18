"""The score by which checkpoints are kept."""

from __future__ import annotations

import math

from rayapp.config.config import Config
from rayapp.driver.run import score_of


def test_evaluations_rank_checkpoints_where_there_are_any_and_rewards_elsewhere() -> None:
    trained = {"reward/mean": 0.5}
    config, evaluated = Config(), Config.model_validate({"eval": {"every_steps": 2}})
    assert score_of(config, trained) == 0.5
    assert score_of(evaluated, trained) is None
    assert score_of(evaluated, trained | {"eval/reward/mean": 0.7}) == 0.7
    assert score_of(config, {"reward/mean": math.nan}) is None
