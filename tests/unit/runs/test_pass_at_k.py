"""pass@k against counting by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from rayapp.core.types import GroupSummary
from rayapp.runs.tracking.metrics import ladder, pass_at_k, summarize_passes
from support import make


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_estimate_is_the_share_of_draws_that_hold_a_right_sample(num_right: int, k: int) -> None:
    draws = list(combinations([True] * num_right + [False] * (5 - num_right), k))

    assert pass_at_k(5, num_right, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def summary(name: str, solved: list[float], valid: list[bool] | None = None) -> GroupSummary:
    given = np.array(valid if valid is not None else [True] * len(solved))
    return make.summary(solved, task=name, valid=given, reward_terms={"solved": np.array(solved, np.float32)})


def test_each_data_source_has_its_own_numbers() -> None:
    metrics = summarize_passes([summary("a", [1, 0, 0, 0]), summary("a", [0, 0, 0, 0]), summary("b", [1, 1, 1, 1])])

    assert metrics["pass_at_1/a"] == pytest.approx(1 / 8)  # (1/4 + 0) / 2
    assert metrics["pass_at_2/a"] == pytest.approx(1 / 4)  # (1/2 + 0) / 2
    assert metrics["pass_at_4/a"] == pytest.approx(1 / 2)
    assert metrics["pass_at_4/b"] == 1.0
    assert metrics["pass_prompts/a"] == 2


def test_a_data_source_that_two_sources_play_has_the_numbers_of_each() -> None:
    metrics = summarize_passes(
        [replace(summary("a", [1, 1]), source="with_tools"), replace(summary("a", [0, 0]), source="without")]
    )

    assert (metrics["pass_at_1/with_tools/a"], metrics["pass_at_1/without/a"]) == (1.0, 0.0)


def test_samples_without_a_verdict_are_left_out() -> None:
    metrics = summarize_passes([summary("a", [1, 0, 0], [True, True, False]), summary("a", [np.nan], [False])])

    assert metrics["pass_at_1/a"] == 0.5
    assert metrics["pass_at_2/a"] == 1.0
    assert "pass_at_3/a" not in metrics
    assert metrics["pass_prompts/a"] == 1


def test_the_ladder_ends_with_all_samples() -> None:
    assert ladder(1) == [1]
    assert ladder(6) == [1, 2, 4, 6]
    assert ladder(0) == []
