"""A metric that checkpoints are kept for must exist in the run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.config.sections import CheckpointSection
from rayapp.core.errors import ConfigError
from rayapp.driver.run import BestMetric
from rayapp.runs.checkpoints import CheckpointFolder

STEP = {"learner/share_computed": 1.0, "learner/entropy": 2.0, "reward/mean": 0.5, "task/a/reward/mean": 0.5}
WITHOUT_SIGNAL = {"learner/share_computed": 0.0, "reward/mean": 0.5}


def best(metric: str, *, keep_best: int = 1, every_steps: int = 0) -> BestMetric:
    checkpoint = {"best_metric": metric, "keep_best": keep_best}
    return BestMetric(Config.model_validate({"checkpoint": checkpoint, "eval": {"every_steps": every_steps}}))


def test_a_name_that_no_step_has_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"best_metric is 'reward/maen', which is not a metric.*mean reward/mean"):
        best("reward/maen").score(STEP)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        best("zzzz").score(STEP)


def test_a_step_that_computed_nothing_proves_nothing() -> None:
    entropy = best("learner/entropy")
    assert entropy.score(WITHOUT_SIGNAL) is None
    assert entropy.score(STEP) == 2.0
    assert entropy.score(WITHOUT_SIGNAL) is None
    typo = best("learner/entopy")
    assert typo.score(WITHOUT_SIGNAL) is None
    with pytest.raises(ConfigError, match="learner/entropy"):
        typo.score(STEP)


def test_another_tasks_number_may_come_later() -> None:
    other = best("task/b/reward/mean")
    assert other.score(STEP) is None
    assert other.score(STEP | {"task/b/reward/mean": 0.1}) == 0.1
    with pytest.raises(ConfigError, match="task/a/reward/mean"):
        best("task/a/reward/men").score(STEP)


def test_a_number_of_an_evaluation_is_looked_for_in_the_first_evaluation() -> None:
    evaluated = best("eval/reward/mean", every_steps=2)
    assert evaluated.score(STEP) is None
    assert evaluated.score(STEP | {"eval/reward/mean": 0.7}) == 0.7
    typo = best("eval/reward/maen", every_steps=2)
    assert typo.score(STEP) is None
    with pytest.raises(ConfigError, match="Did you mean eval/reward/mean"):
        typo.score(STEP | {"eval/reward/mean": 0.7})


def test_without_evaluations_their_numbers_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"best_metric is eval/reward/mean, but eval\.every_steps is 0"):
        best("eval/reward/mean")
    assert best("eval/reward/mean", keep_best=0).score(STEP) is None


def test_what_is_not_finite_is_no_score_and_the_best_that_is_stays(tmp_path: Path) -> None:
    metric = best("learner/entropy")
    folder = CheckpointFolder(tmp_path, CheckpointSection(keep_last=1, keep_best=1))
    for version, entropy in enumerate((1.0, math.nan, 3.0, math.inf, 2.0), start=1):
        pending = folder.begin(version)
        (pending / "weights").write_text("w")
        folder.commit(version, next_group_id=0, score=metric.score(STEP | {"learner/entropy": entropy}))
    # Of 1, 3 and 2 the third step is the best; the fifth is the newest. NaN and infinity are no scores.
    assert [(c.version, c.score) for c in folder.whole()] == [(3, 3.0), (5, 2.0)]
