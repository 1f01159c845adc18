"""Which trajectories of a step are trained, and what its loss is divided by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rayapp.config.algorithm import AlgorithmSection
from rayapp.core.types import RolloutStatus
from rayapp.learner.step_plan import StepTable, advantage_inputs, loss_scale, make_table, row_advantages
from support import make


def table(*valid: list[bool], compares_groups: bool = True, **algorithm: Any) -> StepTable:
    """Groups with these valid trajectories; the first of each was cut at its longest length."""
    summaries = [
        make.summary(
            np.arange(len(group)),
            group_id=number,
            valid=np.array(group),
            statuses=(RolloutStatus.TRUNCATED, *["completed"] * (len(group) - 1)),
            num_response_tokens=np.arange(1, len(group) + 1),
        )
        for number, group in enumerate(valid)
    ]
    return make_table(summaries, AlgorithmSection(**algorithm), compares_groups=compares_groups)


@pytest.mark.parametrize(("compares_groups", "trained"), [(True, [False, False]), (False, [True, False])])
def test_a_trajectory_without_a_valid_one_to_compare_with_is_not_trained(
    *, compares_groups: bool, trained: list[bool]
) -> None:
    assert table([True, False], compares_groups=compares_groups).trained.tolist() == trained


def test_a_group_whose_greedy_baseline_has_no_verdict_is_not_trained() -> None:
    found = table([True, True, True], [True, True, False], adv_estimator="remax", compares_groups=False)

    assert found.trained.tolist() == [True, True, False, False, False, False]


def test_the_loss_is_divided_by_the_trajectories_of_its_mini_batch_without_filtered_ones() -> None:
    found = table([True, True, False, True], [True, True], overlong={"filter": True})

    scale = loss_scale(found, found.group == 0, 8, 1)
    assert (scale.num_trajectories, scale.num_tokens) == (2, 2 + 4)


def test_advantages_of_rewards_are_multiplied_by_their_weight_beside_a_teacher() -> None:
    summaries = [make.summary([1.0, 0.0])]
    algorithm = AlgorithmSection(norm_adv_by_std=False)
    found = make_table(summaries, algorithm, compares_groups=True)
    inputs = advantage_inputs(found, summaries, "grpo")

    weighed = row_advantages(found, inputs, algorithm, reward_weight=0.25)
    assert [float(weighed[row][0]) for row in (0, 1)] == [0.125, -0.125]
