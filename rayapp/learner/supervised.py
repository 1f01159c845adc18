"""Takes supervised steps on one rank: the cross-entropy of demonstrations, with GRPO's model, packing and optimizer.

    loss = -(sum of log-probs of the marked tokens) / (their number, over all ranks)

Transformers' models return the same loss for the same `labels` (tested).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from rayapp.core.types import FloatArray, Group, Trajectory
from rayapp.learner.batch import MicroBatch, TrainItem
from rayapp.learner.metrics import stopwatch, timing_metrics
from rayapp.learner.policy import reduce_gradients, to_device
from rayapp.learner.step import PolicyLearner

NO_PICTURES: Mapping[str, bytes] = MappingProxyType({})


def supervised_step(
    learner: PolicyLearner, step: int, rows: Sequence[Trajectory], pictures: Mapping[str, bytes] = NO_PICTURES
) -> dict[str, float]:
    """Take one optimizer step on this rank's rows, with `pictures` by SHA-256. Return metrics over all ranks.
    Collective."""
    with learner.reading(pictures):
        return _step(learner, step, rows)


def _step(learner: PolicyLearner, step: int, rows: Sequence[Trajectory]) -> dict[str, float]:
    watch = stopwatch(learner.ranks.device)
    with watch("prepare"):
        batches = learner.micro_batches(_items(rows))
        num_tokens = sum(learner.ranks.gather_data(sum(row.num_response_tokens for row in rows)))
    losses, entropy = list[float](), 0.0
    with watch("forward_backward"):
        for number, batch in enumerate(batches):
            reduce_gradients(learner.model, is_last=number == len(batches) - 1)
            loss, nats = _forward_backward(learner, batch, num_tokens)
            losses.append(loss)
            entropy += nats
    with watch("optimizer"):
        norm, is_finite = learner.update(losses, step)
    learner.skipped_steps += not is_finite
    return timing_metrics(watch) | {
        "sft/loss": sum(learner.ranks.gather_data(sum(losses))),
        "sft/entropy": sum(learner.ranks.gather_data(entropy)) / num_tokens,
        "sft/num_tokens": float(num_tokens),
        "learner/grad_norm": norm,
        "learner/lr": float(learner.optimizer.param_groups[0]["lr"]),
        "learner/skipped_steps": float(not is_finite),
        "learner/skipped_steps_total": float(learner.skipped_steps),
    }


def supervised_loss(
    learner: PolicyLearner, rows: Sequence[Trajectory], pictures: Mapping[str, bytes] = NO_PICTURES
) -> float:
    """Return the loss of the rows of all ranks, without a gradient. Collective."""
    with learner.reading(pictures):
        scores = learner.score(_items(rows), learner.model, learner.head_options())
    sums = learner.ranks.gather_data((-sum(float(row.log_probs.sum()) for row in scores.values()),
                                 sum(row.log_probs.size for row in scores.values())))  # fmt: skip
    return float(sum(nll for nll, _ in sums) / max(1, sum(number for _, number in sums)))


def _items(rows: Sequence[Trajectory]) -> list[TrainItem]:
    return [
        TrainItem(row=i, group=i, trajectory=row, advantages=np.zeros(row.num_response_tokens, np.float32))
        for i, row in enumerate(rows)
    ]


def _forward_backward(learner: PolicyLearner, batch: MicroBatch, num_tokens: int) -> tuple[float, float]:
    """Return this micro-batch's share of the loss, and the sum of its entropies."""
    scores = learner.model(to_device(batch, learner.ranks.device, learner.ranks.sequence), learner.head_options())
    if not batch.items:
        scores.log_probs.sum().backward()
        return 0.0, 0.0
    mask = torch.from_numpy(batch.mask).to(scores.log_probs.device)
    share = -(scores.log_probs * mask).sum() / num_tokens
    # FSDP averages the ranks' gradients, but the loss is a sum over ranks.
    (share * learner.ranks.world_size).backward()
    return float(share.detach()), float((scores.entropy.detach() * mask).sum())


def log_probs_of(learner: PolicyLearner, group: Group) -> list[FloatArray]:
    """Return log-probs (R_i,) of each trajectory's response tokens. Collective."""
    items = [
        TrainItem(row=i, group=0, trajectory=t, advantages=np.zeros(t.num_response_tokens, np.float32))
        for i, t in enumerate(group.trajectories)
        if t.num_response_tokens > 0
    ]
    with learner.reading(group.pictures):
        scores = learner.score(items, learner.model, learner.head_options())
    empty = np.zeros(0, np.float32)
    return [scores[i].log_probs if i in scores else empty for i in range(len(group.trajectories))]
