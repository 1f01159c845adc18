"""When a run stops for too many failed rollouts, and how a step's seconds are attributed."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from rayapp.core.errors import TrainingAbortedError
from rayapp.core.timing import Phases
from rayapp.core.types import GroupSummary
from rayapp.driver.group_rules import FailureBudget
from support import make

FOUR = make.summary([0.0] * 4)


def failing(*kinds: str) -> GroupSummary:
    return replace(FOUR, failure_kinds=kinds + ("",) * (4 - len(kinds)))


def test_past_the_ratio_the_run_stops_and_says_what_failed_and_how_often() -> None:
    budget = FailureBudget(max_ratio=0.5)
    budget.record([failing("sandbox_gone", "deadline")])
    assert budget.metrics() == {"rollout/failed_ratio_10_steps": 0.5}

    with pytest.raises(TrainingAbortedError, match=re.escape("62% of the trajectories")) as error:
        budget.record([failing("sandbox_gone", "sandbox_gone", "deadline")])
    assert "sandbox_gone: 3, deadline: 2" in str(error.value)


def test_one_group_never_ends_a_run_that_has_others() -> None:
    budget = FailureBudget(max_ratio=0.3)
    whole = failing("agent", "agent", "agent", "agent")
    budget.record([whole, FOUR])
    with pytest.raises(TrainingAbortedError, match=re.escape("50% of the trajectories")):
        budget.record([whole, FOUR])


def test_steps_older_than_ten_are_forgotten() -> None:
    budget = FailureBudget(max_ratio=0.9)
    budget.record([failing("engine", "engine")])
    for _ in range(10):
        budget.record([FOUR])
    assert budget.ratio == 0.0


def test_phases_and_other_add_up_to_the_step() -> None:
    phases = Phases()
    for name in ("rollout", "train", "rollout"):
        with phases(name):
            time.sleep(0.01)
    metrics = phases.metrics([FOUR])
    parts = sum(metrics[f"timing_s/{name}"] for name in ("rollout", "train", "other"))
    assert parts == pytest.approx(metrics["timing_s/step"], abs=1e-6)
    assert metrics["timing_s/rollout"] >= 0.02


def test_the_wait_for_rollouts_is_split_at_the_last_sampled_token() -> None:
    slow = replace(FOUR, time_generate_s=3.0, time_total_s=3.5)
    metrics = Phases().metrics([FOUR, slow])
    assert (metrics["timing_s/generate"], metrics["timing_s/score"]) == (3.0, 0.5)
