"""Evaluates a model alone (`rayapp eval`), or the weights of a run between two steps. Nothing is trained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rayapp.config.config import Config, sources_of
from rayapp.config.loading import to_yaml
from rayapp.core.aio import run_until_done, side_by_side
from rayapp.core.errors import GroupFailedError, InputError, LearnersLostError
from rayapp.core.files import write_text
from rayapp.core.logs import start_logs
from rayapp.core.timing import Phases
from rayapp.core.types import Group, GroupSummary
from rayapp.driver.cluster import Cluster, open_cluster
from rayapp.driver.feeding import generate
from rayapp.driver.run import Training
from rayapp.driver.saving import is_due
from rayapp.driver.store import StoredGroup
from rayapp.driver.watchdog import Watchdog
from rayapp.rollout.check import check_inputs
from rayapp.rollout.order import ANY_VERSION, Cohort, GroupRequest, evaluation_waves
from rayapp.runs.layout import CHECKPOINTS, EVALUATIONS, METRICS, PARQUET, TRAJECTORIES, step_name
from rayapp.runs.tracking.metrics import JsonlTracker, summarize_passes, summarize_step
from rayapp.runs.trajectories import writing_trajectories

log = logging.getLogger(__name__)


class _StoppedError(Exception):
    """The run stops, and its evaluation has not ended."""


Record = Callable[[Sequence[Group]], None]  # stores sampled groups, other ones at each call; blocks


def run_evaluation(config: Config, out: Path | None = None) -> dict[str, float]:
    """Run `rayapp eval`. Samples go to the folder `out`, for `rayapp view`. Return a training step's metrics."""
    start_logs(config.run.name, config.tracking.log_format)
    check_inputs(config, training=False)
    if out is None:
        return run_until_done(evaluate_model(config))
    with evaluation_folder(config, out) as (record, keep):
        metrics = run_until_done(evaluate_model(config, record=record))
        keep(metrics)
    return metrics


async def evaluate_model(
    config: Config, *, report: Callable[[str], None] = lambda text: None, record: Record | None = None
) -> dict[str, float]:
    """Return metrics of the config's own model, with servers and rollout workers started for this evaluation only."""
    async with open_cluster(config, with_learners=False, report=report) as cluster:
        return await evaluate(cluster, record=record)


async def evaluate(
    cluster: Cluster,
    version: int = 0,
    *,
    watchdog: Watchdog | None = None,
    record: Record | None = None,
    stopping: asyncio.Event | None = None,
) -> dict[str, float]:
    """Evaluate every task and every row of the evaluation files on the servers' current weights, policy `version`.
    Raises _StoppedError between two waves once `stopping` is set."""
    num_prompts = await cluster.rollout_workers[0].num_eval_prompts()
    summaries: list[GroupSummary] = []
    for wave in _waves(cluster.config, num_prompts):
        if stopping is not None and stopping.is_set():
            raise _StoppedError
        # In a synchronous run the prompts of a wave start together, so that the same weights give the same metrics.
        together = cluster.is_synchronous
        cohorts = [Cohort(place=place, size=len(wave)) if together else None for place in range(len(wave))]
        # If a prompt fails, wait for all other prompts: none may still use the servers when the run continues.
        found = await side_by_side(map(partial(_evaluate_prompt, cluster, version, watchdog), wave, cohorts))
        made = [group for group in found if group is not None]
        summaries += [group.summary for group in made]
        if record is not None:
            await _record(cluster, made, record)
    left_out = {"prompts/left_out": float(sum(num_prompts) - len(summaries))} if sum(num_prompts) else {}
    if not summaries:
        return left_out
    return summarize_step(summaries, version=version) | summarize_passes(summaries) | left_out


def _waves(config: Config, num_prompts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    # Prompts that start together are of one source: sources differ in their number of samples.
    first = 0
    for source, number in zip(sources_of(config), num_prompts, strict=True):
        own = source.config
        for wave in evaluation_waves(number, own.rollout, own.train.groups_per_step, own.eval.samples_per_task):
            yield tuple(first + index for index in wave)
        first += number


async def _record(cluster: Cluster, found: Sequence[StoredGroup[Any]], record: Record) -> None:
    try:
        groups = await cluster.fetch_groups(found)
    except LearnersLostError as error:  # only the texts are lost; the metrics exist
        log.warning("the completions of %d evaluated prompts can't be stored: %s", len(found), error)
        return
    await asyncio.to_thread(record, groups)


async def _evaluate_prompt(
    cluster: Cluster, step: int, watchdog: Watchdog | None, index: int, cohort: Cohort | None
) -> StoredGroup[Any] | None:
    """Return the samples; None if the prompt fails during a run: the step must continue."""
    try:
        summary, ref = await generate(
            cluster,
            GroupRequest(group_id=index, policy_version=ANY_VERSION, cohort=cohort, purpose="eval"),
            lambda worker, placed: worker.evaluate(placed, step),
            what=f"the evaluation of prompt {index}",
            watchdog=watchdog,
            reissue=lambda error: ANY_VERSION,
        )
    except GroupFailedError as error:
        if watchdog is None:
            raise
        log.warning("%s This prompt is left out of step %d's evaluation.", error, step)
        return None
    return StoredGroup(summary=summary, ref=ref)


async def validate(run: Training, step: int, phases: Phases) -> dict[str, float]:
    """Evaluate on every `eval.every_steps`-th step and the last, and return `eval/*`; empty on other steps.

    Called between the weight sync and the release of the step's slots: in a synchronous run the servers have no other
    requests, so training samples the same tokens with and without evaluation.
    """
    config = run.cluster.config
    every_steps = config.eval.every_steps
    if every_steps == 0 or not is_due(step, every_steps, last=config.train.num_steps):
        return {}
    with phases("eval"):
        return await evaluate_in_run(run, step)


async def evaluate_in_run(run: Training, step: int) -> dict[str, float]:
    try:
        with run.folder.recording_evaluation(step) as record:
            metrics = await evaluate(run.cluster, step, watchdog=run.watchdog, record=record, stopping=run.stopping)
    except _StoppedError:
        run.tracker.note(f"the evaluation after step {step} is left out: the run stops")
        return {}
    return {f"eval/{name}": value for name, value in metrics.items()}


@contextmanager
def evaluation_folder(config: Config, out: Path) -> Iterator[tuple[Record, Callable[[Mapping[str, float]], None]]]:
    """Hold one evaluation as step 0 in a folder like a run's. Yield functions that store completions, and metrics."""
    if (out / TRAJECTORIES).exists() or (out / CHECKPOINTS).exists():
        raise InputError(f"folder {out} holds a trained run: choose another folder for the evaluation")
    (out / EVALUATIONS).mkdir(parents=True, exist_ok=True)
    write_text(out / "config.yaml", to_yaml(config))

    def keep(metrics: Mapping[str, float]) -> None:
        (out / METRICS).unlink(missing_ok=True)
        JsonlTracker(out / METRICS).log(0, {f"eval/{name}": value for name, value in metrics.items()})

    with writing_trajectories(out / EVALUATIONS / step_name(0, PARQUET), 0) as record:
        yield record, keep
