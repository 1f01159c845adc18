"""Plans one step: the trajectories that count, their advantages, and the division into optimizer steps.

Every rank plans from the summaries of *all* groups, so that ranks agree on every count without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayapp.config.algorithm import NEEDS_GREEDY_BASELINE, AlgorithmSection
from rayapp.core.errors import LearnerError
from rayapp.core.types import FloatArray, Group, GroupSummary, RolloutStatus
from rayapp.learner.algo.advantages import AdvantageInputs, compute_advantages
from rayapp.learner.algo.losses import LossScale
from rayapp.learner.batch import TrainItem
from rayapp.learner.shares import Share, groups_per_minibatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """All R trajectories of the step, one row each; the same on every rank."""

    group: NDArray[np.int64]  # position in the step, (R,)
    index: NDArray[np.int64]  # of each trajectory in its group, (R,)
    trained: NDArray[np.bool_]  # counts in baselines, and in losses unless `filtered`, (R,)
    filtered: NDArray[np.bool_]  # left out of the loss by algorithm.overlong.filter, (R,)
    rewards: FloatArray
    num_response_tokens: NDArray[np.int64]
    num_groups: int

    @property
    def trained_rows(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.trained)

    @property
    def loss_rows(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.trained & ~self.filtered)


def make_table(summaries: Sequence[GroupSummary], algorithm: AlgorithmSection, *, compares_groups: bool) -> StepTable:
    """Mark the trajectories to train on: not invalid ones, the greedy baseline of remax, groups with a reward that is
    not finite, nor a group's only valid trajectory if advantages compare the trajectories of a group."""
    estimator = algorithm.adv_estimator
    trained = [summary.valid.astype(bool) & has_finite_rewards(summary) for summary in summaries]
    for valid in trained:
        if estimator in NEEDS_GREEDY_BASELINE:
            # The greedy trajectory is the group's baseline: without its verdict the other trajectories have no
            # advantage.
            valid[:] = valid & valid[-1]
            valid[-1] = False
        if compares_groups and valid.sum() < 2:
            valid[:] = False
    sizes = [summary.rewards.size for summary in summaries]
    overlong = np.array([status == RolloutStatus.TRUNCATED for s in summaries for status in s.statuses], np.bool_)
    return StepTable(
        group=np.repeat(np.arange(len(sizes)), sizes),
        index=np.concatenate([np.arange(size) for size in sizes]),
        trained=np.concatenate(trained),
        filtered=overlong & algorithm.overlong.filter,
        rewards=np.concatenate([summary.rewards for summary in summaries]),
        num_response_tokens=np.concatenate([summary.num_response_tokens for summary in summaries]).astype(np.int64),
        num_groups=len(sizes),
    )


def has_finite_rewards(summary: GroupSummary) -> bool:
    return bool(np.isfinite(summary.rewards[summary.valid.astype(bool)]).all())


def advantage_inputs(table: StepTable, summaries: Sequence[GroupSummary], estimator: str) -> AdvantageInputs:
    rows = table.trained_rows
    baselines = None
    if estimator in NEEDS_GREEDY_BASELINE:
        baselines = np.array([summaries[g].rewards[-1] for g in table.group[rows]], dtype=np.float32)
    return AdvantageInputs(
        rewards=table.rewards[rows],
        num_response_tokens=table.num_response_tokens[rows],
        group_index=table.group[rows],
        reward_terms=_reward_terms(table, summaries),
        baselines=baselines,
    )


def row_advantages(
    table: StepTable, inputs: AdvantageInputs, algorithm: AlgorithmSection, reward_weight: float
) -> dict[int, FloatArray]:
    """Return the advantages (R_i,) of the trained rows, by row. `reward_weight`: their factor, beside a teacher's."""
    rows = table.trained_rows
    if rows.size == 0:
        return {}
    if reward_weight == 0:
        return zero_advantages(table)
    advantages = compute_advantages(inputs, algorithm).numpy() * reward_weight
    return {int(row): advantages[i, : table.num_response_tokens[row]].astype(np.float32) for i, row in enumerate(rows)}


def zero_advantages(table: StepTable) -> dict[int, FloatArray]:
    """Return advantages (R_i,) of zero for the trained rows, by row."""
    return {int(row): np.zeros(table.num_response_tokens[row], np.float32) for row in table.trained_rows}


def minibatch_of(table: StepTable, num_minibatches: int) -> NDArray[np.int64]:
    """Return the optimizer step (R,) of each row. Groups stay whole and in order."""
    result: NDArray[np.int64] = table.group // groups_per_minibatch(table.num_groups, num_minibatches)
    return result


def loss_scale(table: StepTable, chosen: NDArray[np.bool_], max_response_tokens: int, dp_size: int) -> LossScale:
    """Return the divisors of the loss: counts of the chosen rows over all ranks."""
    rows = table.trained & ~table.filtered & chosen
    return LossScale(
        num_tokens=int(table.num_response_tokens[rows].sum()),
        num_trajectories=int(rows.sum()),
        dp_size=dp_size,
        max_response_tokens=max_response_tokens,
    )


def local_items(
    table: StepTable,
    advantages: dict[int, FloatArray],
    shares: Sequence[Share],
    groups: Sequence[Group],
) -> list[TrainItem]:
    """Return this rank's trajectories that have an entry in `advantages`. LearnerError: a group doesn't match its
    summary."""
    mine = {share.position: (share, group) for share, group in zip(shares, groups, strict=True)}
    items: list[TrainItem] = []
    for row in sorted(advantages):
        share, group = mine.get(int(table.group[row]), (None, None))
        if share is None or group is None or not share.has(int(table.index[row])):
            continue
        trajectory = group.trajectories[int(table.index[row])]
        if trajectory.num_response_tokens != table.num_response_tokens[row]:
            raise LearnerError(
                f"group {group.group_id}, trajectory {table.index[row]} has {trajectory.num_response_tokens} response "
                f"tokens, but its summary says {table.num_response_tokens[row]}: summaries and groups don't match"
            )
        item = TrainItem(
            row=int(row), group=int(table.group[row]), trajectory=trajectory, advantages=advantages[int(row)]
        )
        items.append(item)
    return items


def _reward_terms(table: StepTable, summaries: Sequence[GroupSummary]) -> dict[str, FloatArray]:
    """Return the trained rows' values of terms that all their groups have; failed groups have none."""
    in_play = [set(summaries[group].reward_terms) for group in np.unique(table.group[table.trained])]
    names = sorted(set.intersection(*in_play)) if in_play else []
    return {name: np.concatenate([_term(summary, name) for summary in summaries])[table.trained] for name in names}


def _term(summary: GroupSummary, name: str) -> FloatArray:
    values = summary.reward_terms.get(name)
    return np.full(summary.rewards.size, np.nan, np.float32) if values is None else values
