"""Trains one step on one rank: scoring, forward and backward of every micro-batch, optimizer.

Every rank runs the same collectives in the same order: a rank with fewer micro-batches computes empty ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayapp.config.algorithm import NEEDS_LOG_PROBS
from rayapp.config.config import Config
from rayapp.core.timing import Profile
from rayapp.core.types import FloatArray, Group, GroupSummary
from rayapp.learner.algo.advantages import AdvantageInputs, kl_penalty_of, response_mask, token_kl
from rayapp.learner.algo.distillation import teacher_advantages
from rayapp.learner.algo.losses import (
    Coupled,
    LossRows,
    LossScale,
    aggregated,
    correction_weights,
    coupled_gradients,
    kl_loss,
    make_actor_config,
    mean_weight,
    policy_loss,
)
from rayapp.learner.batch import (
    MicroBatch,
    RowScores,
    TrainItem,
    advantages_of,
    empty_micro_batch,
    rollout_log_probs_of,
    scores_by_row,
    stack_rows,
)
from rayapp.learner.device import moved
from rayapp.learner.distributed import Ranks, reshard
from rayapp.learner.families.pictures import PictureReader, reading, split_items
from rayapp.learner.log_probs import HeadOptions, TeacherHead
from rayapp.learner.metrics import (
    MfuMeter,
    MicroBatchFacts,
    RowFacts,
    StepProfiler,
    mfu_metrics,
    row_facts,
    step_metrics,
    stopwatch,
    timing_metrics,
)
from rayapp.learner.policy import (
    DeviceBatch,
    PolicyModel,
    TokenScores,
    clip_gradients,
    learning_rate,
    reduce_gradients,
    set_learning_rate,
    to_device,
)
from rayapp.learner.shares import Share
from rayapp.learner.step_plan import (
    StepTable,
    advantage_inputs,
    has_finite_rewards,
    local_items,
    loss_scale,
    make_table,
    minibatch_of,
    row_advantages,
    zero_advantages,
)

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PolicyLearner:
    """Policy with its optimizer and the training step: the only mutable state of a learner."""

    config: Config
    ranks: Ranks
    model: PolicyModel
    optimizer: torch.optim.AdamW
    # Models that don't learn, by their names in `frozen_models`.
    frozen: Mapping[str, PolicyModel] = field(default_factory=dict)
    pictures: PictureReader | None = None  # None if the policy is a model for text
    mfu: MfuMeter | None = None  # computes `perf/mfu`; None on a CPU and on an unknown GPU
    optimizer_steps: int = 0
    skipped_steps: int = 0  # in the run, because a loss or gradient was not finite
    # Log-probs (R,) under the weights with which the last step began, by row; only of computed trajectories.
    log_probs_before: dict[int, FloatArray] = field(default_factory=dict)
    profile: Profile | None = None  # of the last step in `train.profile_steps`; only on rank 0
    on_micro_batch: Callable[[int, int], None] = lambda num_done, num_all: None  # before each of a pass
    _profiler: StepProfiler | None = None

    def train_step(
        self,
        step: int,
        summaries: Sequence[GroupSummary],
        shares: Sequence[Share],
        groups: Sequence[Group],
    ) -> dict[str, float]:
        """Train one step. `summaries` are of all groups; `groups` are those of this rank's `shares`, in order."""
        with self._profiled(step), self.reading(*(group.pictures for group in groups)):
            return _Step(self, step, summaries, shares, groups).run()

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        self.profile = None
        if self.ranks.rank or step not in self.config.train.profile_steps:
            yield
            return
        self._profiler = profiler = StepProfiler(self.ranks.device)
        try:
            with profiler.recording():
                yield
        finally:
            self._profiler = None
        self.profile = profiler.profile("learner-0")

    def reading(self, *encoded: Mapping[str, bytes]) -> AbstractContextManager[None]:
        """Provide pictures, by their SHA-256, in the block."""
        models = (self.model, *self.frozen.values())
        return reading(self.pictures, [model.tower for model in models], *encoded)

    def recorded(self, batches: Sequence[MicroBatch]) -> Iterable[MicroBatch]:
        """Yield the micro-batches of one pass; a profiled step records only the first."""
        for number, batch in enumerate(batches if self._profiler is None else self._profiler.first_of(batches)):
            self.on_micro_batch(number, len(batches))
            yield batch

    def score(self, items: Sequence[TrainItem], model: PolicyModel, options: HeadOptions) -> dict[int, RowScores]:
        """Score every item without a gradient. Returns scores by row. Collective."""
        scores: dict[int, RowScores] = {}
        with torch.no_grad():
            for batch in self.recorded(self.micro_batches(items)):
                on_device = to_device(batch, self.ranks.device, self.ranks.sequence)
                scores.update(scores_by_row(batch, model(on_device, options)))
        if self.ranks.device.type != "cpu":
            reshard(model)  # no backward may follow, and a server may need the memory
        return scores

    def micro_batches(self, items: Sequence[TrainItem]) -> list[MicroBatch]:
        """Return this rank's micro-batches, and empty ones up to the largest number of any rank."""
        learner = self.config.learner
        max_tokens = learner.token_budget * learner.sequence_parallel
        if not learner.router_replay:
            items = [replace(item, trajectory=replace(item.trajectory, routed_experts=None)) for item in items]
        batches = split_items(self.pictures, items, max_tokens=max_tokens, share_prefixes=learner.share_prefixes)
        if self.model.replay is not None:
            self.model.replay.check([batch.routed_experts for batch in batches])
        missing = max(self.ranks.gather(len(batches))) - len(batches)
        return batches + [empty_micro_batch()] * missing

    def update(self, losses: Sequence[float], step: int) -> tuple[float, bool]:
        """Update the weights, unless the gradient or a loss is not finite on some rank. Collective. Return the
        gradient's norm before clipping, and whether the weights were updated."""
        section, train = self.config.learner.optimizer, self.config.train
        self.optimizer_steps += 1
        rate = learning_rate(self.optimizer_steps, train.num_steps * train.num_minibatches, section)
        set_learning_rate(self.optimizer, rate)
        self._fill_missing_gradients()
        norm = clip_gradients(self.model, section.max_grad_norm)
        finite = all(self.ranks.gather(all(math.isfinite(loss) for loss in losses)))
        is_finite = math.isfinite(norm) and finite
        if is_finite:
            self.optimizer.step()
        else:
            log.warning(
                "step %d: optimizer step %d is skipped: gradient norm %g, losses %s",
                step,
                self.optimizer_steps,
                norm,
                losses,
            )
        self.optimizer.zero_grad()
        return norm, is_finite

    def _fill_missing_gradients(self) -> None:
        # AdamW then updates these parameters by their momentum.
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def head_options(self, *, needs_sum_pi_squared: bool = False) -> HeadOptions:
        return HeadOptions(
            temperature=self.config.rollout.temperature,
            chunk_rows=self.config.learner.log_prob_chunk_tokens,
            entropy_needs_grad=self.config.algorithm.entropy_coef > 0,
            needs_sum_pi_squared=needs_sum_pi_squared,
            is_compiled=self.config.compiles(on_gpu=self.ranks.device.type == "cuda"),
        )


class _Step:
    def __init__(
        self,
        learner: PolicyLearner,
        step: int,
        summaries: Sequence[GroupSummary],
        shares: Sequence[Share],
        groups: Sequence[Group],
    ) -> None:
        self.learner, self.config, self.number = learner, learner.config, step
        self.algorithm = learner.config.algorithm
        self.summaries, self.shares, self.groups = summaries, shares, groups
        self.watch = stopwatch(learner.ranks.device)
        self.micro_facts: list[MicroBatchFacts] = []
        self.row_facts: dict[int, RowFacts] = {}
        # Results of this pass, with a function that makes a micro-batch's facts from its loss.
        self.unread: list[tuple[MicroBatch, LossRows, Tensor, Callable[..., MicroBatchFacts]]] = []
        self.old: dict[int, RowScores] = {}
        # Log-probs (R,) of the sampled tokens, by model (or teacher) and row.
        self.frozen: dict[str, dict[int, FloatArray]] = {}
        self.kl_metrics: dict[str, float] = {}
        self.mean_weight = 1.0  # divisor of importance weights (see `LossScale`)
        self.grad_norms: list[float] = []
        self.num_skipped = 0

    def run(self) -> dict[str, float]:
        with self.watch("prepare"):
            table = make_table(self.summaries, self.algorithm, compares_groups=self.config.compares_groups)
        items = self._items(table)
        minibatches = minibatch_of(table, self.config.train.num_minibatches)
        for number in range(self.config.train.num_minibatches):
            chosen = minibatches == number
            mine = [item for item in items if minibatches[item.row] == number]
            longest = self.config.rollout.max_completion_tokens
            scale = loss_scale(table, chosen, longest, self.learner.ranks.world_size)
            self._optimizer_step(mine, replace(scale, mean_weight=self.mean_weight))
        with self.watch("metrics"):
            metrics = self._metrics(table)
        return metrics | timing_metrics(self.watch)

    def _items(self, table: StepTable) -> list[TrainItem]:
        """Return the items without those whose gradient is known to be zero."""
        if bad := [summary.group_id for summary in self.summaries if not has_finite_rewards(summary)]:
            log.warning("step %d leaves out groups %s, because their rewards are not finite", self.number, bad)
        scored: list[TrainItem] = []
        if self.algorithm.scores_before_advantages:
            scored = local_items(table, zero_advantages(table), self.shares, self.groups)
            self._score(scored)
        with self.watch("prepare"):
            inputs = self._advantage_inputs(table, scored)
            weight = self.config.distillation.reward_weight
            advantages = row_advantages(table, inputs, self.algorithm, weight)
            in_loss = {int(row): advantages[int(row)] for row in table.loss_rows}
            items = local_items(table, in_loss, self.shares, self.groups)
            pulls = self.config.pulls_at_zero_advantage
            items = [item for item in items if pulls or np.any(item.advantages)]
        if not self.algorithm.scores_before_advantages:
            self._score(items)
        return items

    def _advantage_inputs(self, table: StepTable, scored: Sequence[TrainItem]) -> AdvantageInputs:
        """Return the estimator's inputs; `scored` has this rank's trained rows (`scores_before_advantages`).
        Collective."""
        inputs = advantage_inputs(table, self.summaries, self.algorithm.adv_estimator)
        if self.algorithm.kl_in_reward.coef > 0 and len(inputs.rewards):
            inputs = replace(inputs, kl_penalty=self._kl_penalty(table, scored))
        if self.algorithm.adv_estimator not in NEEDS_LOG_PROBS and not self.algorithm.normalizes_by_step:
            return inputs
        old = self._over_ranks(table, {row: scores.log_probs for row, scores in self.old.items()})
        rollout = self._over_ranks(table, {item.row: item.rollout_log_probs for item in scored})
        mask = response_mask(inputs.num_response_tokens)
        weights = correction_weights(old, rollout, mask, self.algorithm) if len(inputs.rewards) else None
        if weights is not None and self.algorithm.normalizes_by_step:
            self.mean_weight = mean_weight(weights, mask, self.algorithm)
            weights = weights / self.mean_weight
        if self.algorithm.adv_estimator not in NEEDS_LOG_PROBS:
            return inputs
        squares = self._over_ranks(table, {row: scores.sum_pi_squared for row, scores in self.old.items()})
        return replace(inputs, old_log_probs=old, sum_pi_squared=squares, is_weights=weights)

    def _kl_penalty(self, table: StepTable, scored: Sequence[TrainItem]) -> Tensor:
        """Return the reward (B, T) that trained tokens lose. Collective."""
        section, reference = self.algorithm.kl_in_reward, self.frozen["reference"]
        is_bypass = self.algorithm.policy_loss == "bypass_mode"
        old = {item.row: item.rollout_log_probs if is_bypass else self.old[item.row].log_probs for item in scored}
        kl = self._over_ranks(table, {row: token_kl(own, reference[row], section) for row, own in old.items()})
        penalty = kl_penalty_of(kl, table.num_response_tokens[table.trained], section.coef)
        self.kl_metrics = {"learner/reward_kl_penalty": penalty.mean_kl}
        return penalty.rewards

    def _over_ranks(self, table: StepTable, own: Mapping[int, FloatArray]) -> Tensor:
        """Gather values (B, T) of all trained rows, given this rank's. Collective."""
        rows = {row: values for part in self.learner.ranks.gather_data(own) for row, values in part.items()}
        width = int(table.num_response_tokens[table.trained].max(initial=1))
        return stack_rows([rows[int(row)] for row in table.trained_rows], width)

    def _score(self, items: Sequence[TrainItem]) -> None:
        learner = self.learner
        # Scoring is collective, so all ranks must decide alike. Decide by the config and not by `self.old`, which is
        # empty on a rank that has only failed groups.
        if self.config.scores_old_log_probs:
            with self.watch("old_log_probs"):
                options = learner.head_options(needs_sum_pi_squared=self.algorithm.adv_estimator in NEEDS_LOG_PROBS)
                self.old = learner.score(items, learner.model, options)
        if "reference" in learner.frozen:
            with self.watch("ref"):
                self.frozen["reference"] = self._log_probs(items, learner.frozen["reference"])
        section = self.config.distillation
        if (
            section.teacher and not section.needs_logits
        ):  # otherwise the teacher reads each micro-batch together with the policy
            with self.watch("teacher"):
                self.frozen["teacher"] = self._log_probs(items, learner.frozen["teacher"])

    def _log_probs(self, items: Sequence[TrainItem], model: PolicyModel) -> dict[int, FloatArray]:
        scores = self.learner.score(items, model, self.learner.head_options())
        # Without a backward pass the model's embedding and head would stay gathered and take memory.
        model.reshard()  # type: ignore[operator]
        return {row: found.log_probs for row, found in scores.items()}

    def _optimizer_step(self, items: Sequence[TrainItem], scale: LossScale) -> None:
        learner = self.learner
        if not scale.num_trajectories:  # the same on all ranks
            log.warning("step %d: an optimizer step is skipped: no trajectory is in its loss", self.number)
            learner.optimizer_steps += 1
            self.grad_norms.append(0.0)
            self.num_skipped += 1
            return
        with self.watch("prepare"):
            batches = learner.micro_batches(items)
            actor_config = make_actor_config(self.algorithm, scale, self.config.rollout.group_size)
        coupled = self._coupled_gradients(items, scale, actor_config)
        num_before = len(self.micro_facts)
        with self.watch("forward_backward"):
            for number, batch in enumerate(learner.recorded(batches)):
                reduce_gradients(learner.model, is_last=number == len(batches) - 1)
                self._forward_backward(batch, scale, actor_config, coupled)
            self._read()
            if self.config.distillation.needs_logits:
                learner.frozen["teacher"].reshard()  # type: ignore[operator]
        with self.watch("optimizer"):
            norm, is_finite = learner.update([facts.loss for facts in self.micro_facts[num_before:]], self.number)
        self.grad_norms.append(norm)
        self.num_skipped += not is_finite

    def _coupled_gradients(self, items: Sequence[TrainItem], scale: LossScale, actor_config: Any) -> Coupled | None:
        if not self.algorithm.is_batch_coupled:
            return None
        learner = self.learner
        current = self.old
        if self.config.train.num_minibatches > 1:
            with self.watch("old_log_probs"):
                current = learner.score(items, learner.model, learner.head_options())
        mine = [(self._distilled(item), current[item.row].log_probs, self.old[item.row].log_probs) for item in items]
        everyone = [part for parts in learner.ranks.gather_data(mine) for part in parts]
        seed = self.config.run.seed * 1_000_003 + learner.optimizer_steps
        return coupled_gradients(everyone, self.algorithm, actor_config, scale, seed=seed)

    def _distilled(self, item: TrainItem) -> TrainItem:
        if "teacher" not in self.frozen:
            return item
        teacher, old = self.frozen["teacher"][item.row], self.old[item.row].log_probs
        worth = teacher_advantages(torch.from_numpy(teacher), torch.from_numpy(old), self.config.distillation)
        more: FloatArray = worth.numpy()
        return replace(item, advantages=item.advantages + more)

    def _teacher_head(self, on_device: DeviceBatch) -> TeacherHead | None:
        """Return the teacher's head, if the loss needs its whole distribution. Collective."""
        learner, section = self.learner, self.config.distillation
        if not section.needs_logits:
            return None
        with torch.no_grad():
            head: TeacherHead = learner.frozen["teacher"].read(on_device, learner.head_options(), section)
        return head

    def _forward_backward(
        self, batch: MicroBatch, scale: LossScale, actor_config: Any, coupled: Coupled | None
    ) -> None:
        learner = self.learner
        on_device = to_device(batch, learner.ranks.device, learner.ranks.sequence)
        tower = learner.model.tower
        num_seen = 0 if tower is None else tower.num_tokens
        scores = learner.model(on_device, learner.head_options(), self._teacher_head(on_device))
        if not batch.items:
            scores.log_probs.sum().backward()
            return
        rows = self._loss_rows(batch, scores)
        if coupled is None:
            result = policy_loss(rows, self.algorithm, actor_config, scale)
            loss, metrics = result.loss, result.metrics
        else:
            loss, metrics = coupled.surrogate(rows.log_probs, [item.row for item in batch.items]), {}
        loss = self._regularised(loss, rows, scale)
        loss.backward()  # type: ignore[no-untyped-call]
        facts = partial(
            MicroBatchFacts,
            num_computed_tokens=batch.packing.num_tokens,
            num_input_tokens=sum(item.num_inputs for item in batch.items),
            num_trained_tokens=batch.num_trained_tokens,
            num_heads=batch.head_positions.size,
            num_attended=batch.packing.num_attended,
            num_input_attended=sum(item.num_attended for item in batch.items),
            num_picture_tokens=0 if tower is None else tower.num_tokens - num_seen,
            metrics=metrics,
        )
        self.unread.append((batch, rows.detached(), loss.detach() / scale.dp_size, facts))

    def _read(self) -> None:
        """Copy results to the host after a pass: between two micro-batches it would wait for the GPU."""
        for batch, rows, loss, facts in self.unread:
            self.micro_facts.append(facts(loss=float(loss)))
            self.row_facts |= row_facts(batch, rows)
        self.unread.clear()

    def _loss_rows(self, batch: MicroBatch, scores: TokenScores) -> LossRows:
        device, width = scores.log_probs.device, batch.mask.shape[1]
        old = scores.log_probs.detach()
        if self.old:
            old = moved(stack_rows([self.old[item.row].log_probs for item in batch.items], width), device)
        frozen = {
            name: moved(stack_rows([found[item.row] for item in batch.items], width), device)
            for name, found in self.frozen.items()
        }
        mask, advantages = moved(batch.mask, device), moved(advantages_of(batch), device)
        section, teacher_kl = self.config.distillation, None
        if section.needs_logits:
            teacher_kl = scores.teacher_kl
        elif "teacher" in frozen:
            teacher_kl = (old - frozen["teacher"]) * mask
            advantages += teacher_advantages(frozen["teacher"], old, section) * mask
        return LossRows(
            log_probs=scores.log_probs,
            old_log_probs=old,
            rollout_log_probs=moved(rollout_log_probs_of(batch), device),
            advantages=advantages,
            mask=mask,
            entropy=scores.entropy,
            ref_log_probs=frozen.get("reference"),
            teacher_kl=teacher_kl,
        )

    def _regularised(self, loss: Tensor, rows: LossRows, scale: LossScale) -> Tensor:
        if self.algorithm.kl_loss_coef > 0:
            loss = loss + self.algorithm.kl_loss_coef * kl_loss(rows, self.algorithm, scale)
        if self.config.distillation.needs_logits:
            assert rows.teacher_kl is not None
            weight = self.config.distillation.weight
            loss = loss + weight * aggregated(rows.teacher_kl, rows.mask, self.algorithm, scale)
        if self.algorithm.entropy_coef > 0:
            assert rows.entropy is not None, "the entropy bonus needs entropies"
            loss = loss - self.algorithm.entropy_coef * aggregated(rows.entropy, rows.mask, self.algorithm, scale)
        return loss

    def _agreement(self) -> dict[str, float]:
        replay = self.learner.model.replay
        if replay is None:
            return {}
        alike, taken = np.sum(self.learner.ranks.gather_data(replay.take_agreement()), axis=0)
        return {"learner/router_agreement": float(alike / taken)} if taken else {}

    def _metrics(self, table: StepTable) -> dict[str, float]:
        learner = self.learner
        learner.skipped_steps += self.num_skipped
        micro = [fact for part in learner.ranks.gather_data(self.micro_facts) for fact in part]
        rows: dict[int, RowFacts] = {}
        for part in learner.ranks.gather_data(self.row_facts):
            rows.update(part)
        learner.log_probs_before = {row: facts.old_log_probs for row, facts in rows.items()}
        metrics = step_metrics(micro, rows, table, self.config.distillation) | self._agreement() | self.kl_metrics
        if learner.mfu is not None:
            metrics |= mfu_metrics(micro, learner.mfu, self.watch.seconds(("forward_backward",))[0]["forward_backward"])
        return metrics | {
            "learner/grad_norm": float(np.mean(self.grad_norms)),
            "learner/groups_not_finite": float(sum(not has_finite_rewards(summary) for summary in self.summaries)),
            "learner/lr": float(learner.optimizer.param_groups[0]["lr"]),
            "learner/skipped_steps": float(self.num_skipped),
            "learner/skipped_steps_total": float(learner.skipped_steps),
        }
