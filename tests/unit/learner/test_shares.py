"""Each rank's share: every trajectory once, and in every mini-batch about as many tokens on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayapp.config.config import Config, with_values
from rayapp.core.types import GroupSummary
from rayapp.learner.shares import Share, deal, groups_per_minibatch
from support import make

PROMPT = 100


def config(num_minibatches: int = 1, **algorithm: Any) -> Config:
    return Config.model_validate(
        {"train": {"groups_per_step": 16, "num_minibatches": num_minibatches}, "algorithm": algorithm}
    )


def summary(position: int, num_response_tokens: list[int], rewards: list[float] | None = None) -> GroupSummary:
    sizes = np.array(num_response_tokens, np.int32)
    tokens = {"num_tokens": sizes + PROMPT, "num_response_tokens": sizes, "num_prompt_tokens": PROMPT}
    return make.summary(rewards or range(sizes.size), group_id=position, **tokens)


def tokens(shares: tuple[Share, ...], summaries: list[GroupSummary]) -> int:
    """Return the tokens that a rank computes: each prompt once, and the responses of its trajectories."""
    return sum(PROMPT + int(summaries[s.position].num_response_tokens[s.start : s.stop].sum()) for s in shares)


BEYOND_THE_GROUP = ("gdpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "mine")


@pytest.mark.parametrize(
    "changes",
    [
        *({"adv_estimator": name} for name in BEYOND_THE_GROUP),
        {"policy_loss": "mine"},
        {"kl_loss_coef": 0.1},
        {"entropy_coef": 0.1},
    ],
)
def test_groups_of_equal_rewards_teach_where_something_pulls_without_an_advantage(changes: dict[str, Any]) -> None:
    equal = [summary(position, [10, 10], rewards=[1.0, 1.0]) for position in range(2)]

    assert not all(tokens(shares, equal) for shares in deal(equal, config(), 2))
    assert all(tokens(shares, equal) for shares in deal(equal, with_values(config(), algorithm=changes), 2))


@given(num_groups=st.integers(1, 200), num_minibatches=st.integers(1, 9))
def test_a_step_has_no_more_mini_batches_than_the_config_says(num_groups: int, num_minibatches: int) -> None:
    size = groups_per_minibatch(num_groups, num_minibatches)

    assert -(-num_groups // size) <= num_minibatches
    assert size == 1 or -(-num_groups // (size - 1)) > num_minibatches


GROUPS = st.lists(st.lists(st.integers(1, 2000), min_size=2, max_size=6), min_size=1, max_size=12)


@given(groups=GROUPS, num_ranks=st.integers(1, 9), num_minibatches=st.integers(1, 3))
def test_every_trajectory_goes_to_exactly_one_rank(
    groups: list[list[int]], num_ranks: int, num_minibatches: int
) -> None:
    summaries = [summary(position, sizes) for position, sizes in enumerate(groups)]
    shares = deal(summaries, with_values(config(), train={"num_minibatches": num_minibatches}), num_ranks)
    assert len(shares) == num_ranks
    dealt = [(s.position, i) for mine in shares for s in mine for i, _ in enumerate(groups[s.position]) if s.has(i)]
    assert sorted(dealt) == [(position, i) for position, sizes in enumerate(groups) for i in range(len(sizes))]
    assert all(len({s.position for s in mine}) == len(mine) for mine in shares)


@given(groups=GROUPS, num_ranks=st.integers(1, 9))
def test_the_busiest_rank_is_ahead_by_one_trajectory_at_most(groups: list[list[int]], num_ranks: int) -> None:
    summaries = [summary(position, sizes) for position, sizes in enumerate(groups)]
    loads = [tokens(mine, summaries) for mine in deal(summaries, config(), num_ranks)]
    even = sum(PROMPT + sum(sizes) for sizes in groups) / num_ranks
    assert max(loads) <= even + PROMPT + max(max(sizes) for sizes in groups) + 1


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_every_mini_batch_keeps_all_of_eight_ranks_busy(num_minibatches: int) -> None:
    rng = np.random.default_rng(0)
    groups = [rng.integers(200, 1024, 16).tolist() for _ in range(16)]
    summaries, size = [summary(p, sizes) for p, sizes in enumerate(groups)], 16 // num_minibatches
    shares = deal(summaries, config(num_minibatches), 8)
    took = 0
    for first in range(0, 16, size):
        parts = [tuple(s for s in mine if first <= s.position < first + size) for mine in shares]
        took += max(tokens(part, summaries) for part in parts)
    # Ranks wait for each other after each mini-batch. Distributed over the whole step, the ratio was 2.0 for two of
    # them.
    assert took / (sum(PROMPT + sum(sizes) for sizes in groups) / 8) <= 1.1


def test_groups_that_teach_nothing_keep_no_rank_busy() -> None:
    summaries = [summary(0, [500, 500], [1.0, 1.0]), summary(1, [500, 500], [0.0, 1.0])]
    # Both trajectories that are computed are apart, although the four together are dealt in order.
    assert deal(summaries, config(), 2) == ((Share(0, 0, 2), Share(1, 0, 1)), (Share(1, 1, 2),))
    # With a loss that pulls at all of them, each rank gets a group.
    assert deal(summaries, config(kl_loss_coef=0.1), 2) == ((Share(0, 0, 2),), (Share(1, 0, 2),))
