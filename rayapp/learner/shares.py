"""Assigns a step's trajectories to ranks, so that in every mini-batch all ranks have about equally many tokens.

The driver calls it, so it does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rayapp.config.config import Config
from rayapp.core.types import GroupSummary


class Share(NamedTuple):
    """Consecutive trajectories of a group. Examples: `Share(3, 0, 8)`, the first eight; `Share(3)`, all."""

    position: int  # of the group in its step
    start: int = 0
    stop: int | None = None

    def has(self, index: int) -> bool:
        return index >= self.start and (self.stop is None or index < self.stop)


class _Row(NamedTuple):
    position: int
    trajectory: int
    num_tokens: int  # computed only for this trajectory
    num_shared: int  # computed once for all its trajectories of the group


Shares = tuple[tuple[Share, ...], ...]  # of each rank (sequence group), in the order of the step


def deal(summaries: Sequence[GroupSummary], config: Config, num_ranks: int) -> Shares:
    """Return each rank's shares, in the order of the step. Few groups are split, and the busiest rank has as few tokens
    as possible."""
    size = groups_per_minibatch(len(summaries), config.train.num_minibatches)
    shares: list[list[Share]] = [[] for _ in range(num_ranks)]
    shares_prefixes, skips = config.learner.share_prefixes, config.skips_equal_rewards
    for first in range(0, len(summaries), size):
        rows = [
            row
            for position in range(first, min(first + size, len(summaries)))
            for row in _rows(position, summaries[position], shares_prefixes=shares_prefixes, skips=skips)
        ]
        for row, rank in zip(rows, _ranks(rows, num_ranks), strict=True):
            _add(shares[rank], row)
    return tuple(tuple(mine) for mine in shares)


def groups_per_minibatch(num_groups: int, num_minibatches: int) -> int:
    return max(1, -(-num_groups // num_minibatches))


def _rows(position: int, summary: GroupSummary, *, shares_prefixes: bool, skips: bool) -> Iterator[_Row]:
    # `skips`: groups of equal rewards have no gradient
    shared = summary.num_prompt_tokens if shares_prefixes else 0
    rewards = summary.rewards[summary.valid.astype(bool)]
    is_idle = skips and not (rewards.size and np.ptp(rewards) > 0)
    for index, (num_tokens, is_valid) in enumerate(zip(summary.num_tokens, summary.valid, strict=True)):
        if is_idle or not is_valid:
            yield _Row(position, index, 0, 0)
        else:
            yield _Row(position, index, max(0, int(num_tokens) - shared), shared)


def _ranks(rows: Sequence[_Row], num_ranks: int) -> list[int]:
    """Return each row's rank: consecutive rows, and as few tokens as possible on the busiest rank."""
    low, high = 0, sum(row.num_tokens + row.num_shared for row in rows)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(rows, middle)[-1] < num_ranks else (middle + 1, high)
    return _fill(rows, high) if rows else []


def _fill(rows: Sequence[_Row], capacity: int) -> list[int]:
    ranks, rank, load, last = [], 0, 0, -1
    for row in rows:
        more = row.num_tokens + (row.num_shared if row.position != last else 0)
        if load + more > capacity and load:
            rank, load, more = rank + 1, 0, row.num_tokens + row.num_shared
        if more > capacity:
            return [sys.maxsize]  # a single row exceeds the capacity
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
