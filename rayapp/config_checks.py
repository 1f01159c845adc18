"""What has to hold between the keys of a configuration. Called by `Config` itself; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayapp.algo.names import NEEDS_NO_GROUP

if TYPE_CHECKING:
    from rayapp.config import Config

FEWER_GPUS = "Lower server.num_servers, server.tensor_parallel_size or learner.num_learners"


def check(config: Config) -> None:
    """Raises ValueError: what does not fit together, both values, and the way out."""
    _tasks_or_data(config)
    _placement_fits(config)
    _gpus_suffice(config)
    _minibatches_divide(config)
    _sequence_fits_microbatch(config)
    _dapo_fits(config)
    _best_metric_exists(config)


def _best_metric_exists(config: Config) -> None:
    metric, keep_best = config.checkpoint.best_metric, config.checkpoint.keep_best
    if keep_best and metric.startswith("eval/") and config.eval.every_steps == 0:
        raise ValueError(
            f"checkpoint.best_metric is {metric}, but eval.every_steps is 0: nothing is evaluated during training, "
            f"and checkpoint.keep_best = {keep_best} would keep nothing. Set eval.every_steps, or use reward/mean."
        )


def _dapo_fits(config: Config) -> None:
    buffer, longest = config.algorithm.overlong.buffer_tokens, config.rollout.max_completion_tokens
    if buffer >= longest:
        raise ValueError(
            f"algorithm.overlong.buffer_tokens is {buffer}, but rollout.max_completion_tokens is {longest}: every "
            f"completion would be punished. Use less than {longest}."
        )
    estimator = config.algorithm.adv_estimator
    if config.algorithm.dynamic_sampling.enabled and estimator in ("gdpo", *NEEDS_NO_GROUP):
        raise ValueError(
            f"algorithm.dynamic_sampling drops groups of equal rewards, which teach {estimator} something: its "
            "baseline is not the mean of the group's rewards. Turn it off, or use grpo."
        )


def _tasks_or_data(config: Config) -> None:
    if config.uses_data and config.tasks:
        raise ValueError(
            f"tasks ({', '.join(config.tasks)}) and data.train_files or data.eval_files are both set: a run has one "
            "or the other. Leave one out."
        )
    if config.agent.tool_file and not config.uses_data:
        raise ValueError(
            f"agent.tool_file is {config.agent.tool_file!r}, but tools are for data rows and this run has none: set "
            "data.train_files (docs/data.md), or leave agent.tool_file empty."
        )


def _gpus_suffice(config: Config) -> None:
    have = config.cluster.num_gpus
    if have is None or config.cluster.device == "cpu":
        return
    if config.num_gpus_needed > have:
        raise ValueError(f"{config.gpu_arithmetic}, but cluster.num_gpus is {have}. {FEWER_GPUS}.")


def _placement_fits(config: Config) -> None:
    if config.cluster.placement == "split":
        return
    servers, tp, learners = config.server.num_servers, config.server.tensor_parallel_size, config.learner.num_learners
    if servers * tp != learners:
        raise ValueError(
            f"cluster.placement is colocated: {servers} servers x TP {tp} = {servers * tp} GPUs must be those of "
            f"{learners} learners, one each. Make learner.num_learners {servers * tp}, or use placement split."
        )
    if config.train.max_staleness > 0:
        raise ValueError(
            f"cluster.placement is colocated and train.max_staleness is {config.train.max_staleness}: on shared GPUs "
            "nothing is generated while the learners train. Use max_staleness 0, or placement split."
        )


def _minibatches_divide(config: Config) -> None:
    groups, minibatches = config.train.groups_per_step, config.train.num_minibatches
    if groups % minibatches:
        raise ValueError(
            f"train.groups_per_step = {groups} groups x rollout.group_size = {config.rollout.group_size} cannot be "
            f"split into train.num_minibatches = {minibatches} equal parts of whole groups: "
            f"{groups} / {minibatches} = {groups / minibatches:g}. Use a divisor of {groups}."
        )


def _sequence_fits_microbatch(config: Config) -> None:
    longest, budget = config.max_model_tokens, config.learner.max_tokens_per_microbatch
    if isinstance(budget, int) and longest > budget:
        raise ValueError(
            f"rollout.max_prompt_tokens {config.rollout.max_prompt_tokens} + rollout.max_completion_tokens "
            f"{config.rollout.max_completion_tokens} = {longest} tokens, but learner.max_tokens_per_microbatch is "
            f"{budget}: the longest trajectory would fit in no micro-batch. Raise it to at least {longest}."
        )
