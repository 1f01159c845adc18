"""Which rank trains on which trajectories: about as many tokens each, in every mini-batch.

Ranks wait for each other at every optimizer step, so each mini-batch is dealt by itself. Called by the driver and so
without torch; `PolicyLearner` gets the result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayapp.config.algorithm_names import BATCH_COUPLED_LOSSES, NEEDS_LOG_PROBS, NEEDS_NO_GROUP
from rayapp.config.config import Config
from rayapp.core.types import GroupSummary


class Share(NamedTuple):
    """Neighbouring trajectories of a group. Examples: `Share(3, 0, 8)`, the first eight; `Share(3)`, all."""

    position: int
    """Of the group in its step."""
    start: int = 0
    stop: int | None = None

    def has(self, index: int) -> bool:
        """Whether trajectory `index` of the group is in it."""
        return index >= self.start and (self.stop is None or index < self.stop)


class _Row(NamedTuple):
    """A trajectory, as far as it is dealt."""

    position: int
    trajectory: int
    num_tokens: int
    """Tokens that it computes alone."""
    num_shared: int
    """Tokens that a rank computes once for all of the group's trajectories that it has."""


Shares = tuple[tuple[Share, ...], ...]
"""By the group of ranks that trains on them, in the order of the step."""


def deal(summaries: Sequence[GroupSummary], config: Config, num_ranks: int) -> Shares:
    """Each rank's shares, in the order of the step: runs of neighbours, so that few groups are cut.

    The busiest rank of a mini-batch is ahead of the others by one trajectory at most.
    """
    size = groups_per_minibatch(len(summaries), config.train.num_minibatches)
    shares: list[list[Share]] = [[] for _ in range(num_ranks)]
    for first in range(0, len(summaries), size):
        rows = [
            row
            for position in range(first, min(first + size, len(summaries)))
            for row in _rows(position, summaries[position], config)
        ]
        for row, rank in zip(rows, _ranks(rows, num_ranks), strict=True):
            _add(shares[rank], row)
    return tuple(tuple(mine) for mine in shares)


def groups_per_minibatch(num_groups: int, num_minibatches: int) -> int:
    """Whole groups of one optimizer step; at least 1."""
    return max(1, -(-num_groups // num_minibatches))


def pulls_at_zero_advantage(config: Config) -> bool:
    """Whether a trajectory without any advantage has a gradient: a loss other than the policy's is configured."""
    algorithm = config.algorithm
    return (
        algorithm.kl_loss_coef > 0
        or bool(config.distillation.teacher)
        or algorithm.entropy_coef > 0
        or algorithm.policy_loss in (*BATCH_COUPLED_LOSSES, "dro")
    )


def _rows(position: int, summary: GroupSummary, config: Config) -> Iterator[_Row]:
    """The group's trajectories. Those that are not computed take no time."""
    shared = summary.num_prompt_tokens if config.learner.share_prefixes else 0
    is_idle = not _teaches(summary, config)
    for index, (num_tokens, is_valid) in enumerate(zip(summary.num_tokens, summary.valid, strict=True)):
        if is_idle or not is_valid:
            yield _Row(position, index, 0, 0)
        else:
            yield _Row(position, index, max(0, int(num_tokens) - shared), shared)


def _teaches(summary: GroupSummary, config: Config) -> bool:
    """False if nothing of the group will be computed, as its trajectories have equal rewards."""
    estimator = config.algorithm.adv_estimator
    looks_beyond = ("gdpo", "reinforce_plus_plus_baseline", *NEEDS_NO_GROUP, *NEEDS_LOG_PROBS)
    if pulls_at_zero_advantage(config) or estimator in looks_beyond:
        return True
    rewards = summary.rewards[summary.valid.astype(bool)]
    return bool(rewards.size) and bool(np.ptp(rewards) > 0)


def _ranks(rows: Sequence[_Row], num_ranks: int) -> list[int]:
    """The rank of each row: as few tokens on the busiest rank as runs of neighbours allow."""
    low, high = 0, sum(row.num_tokens + row.num_shared for row in rows)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(rows, middle)[-1] < num_ranks else (middle + 1, high)
    return _fill(rows, high) if rows else []


def _fill(rows: Sequence[_Row], capacity: int) -> list[int]:
    """The rank of each row, when each rank takes rows until it would have more tokens than `capacity`."""
    ranks, rank, load, last = [], 0, 0, -1
    for row in rows:
        more = row.num_tokens + (row.num_shared if row.position != last else 0)
        if load + more > capacity and load:
            rank, load, more = rank + 1, 0, row.num_tokens + row.num_shared
        if more > capacity:
            return [sys.maxsize]  # one row alone is larger
        load += more
        last = row.position if row.num_shared else last
        ranks.append(rank)
    return ranks or [0]


def _add(shares: list[Share], row: _Row) -> None:
    last = shares[-1] if shares else None
    if last is not None and last.position == row.position:
        shares[-1] = Share(row.position, last.start, row.trajectory + 1)
    else:
        shares.append(Share(row.position, row.trajectory, row.trajectory + 1))
