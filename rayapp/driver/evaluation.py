"""Evaluations: of a model alone (`rayapp eval`), and of the weights of a run between two steps. They train nothing.

Called by the CLI and by the driver's step.
"""

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
from rayapp.core.errors import InputError, LearnersLostError
from rayapp.core.files import write_text
from rayapp.core.logs import start_logs
from rayapp.core.types import Group, GroupSummary
from rayapp.driver.cluster import Cluster, open_cluster
from rayapp.driver.lost_groups import generate
from rayapp.driver.phases import Phases
from rayapp.driver.run import Run
from rayapp.driver.saving import is_due
from rayapp.driver.store import StoredGroup
from rayapp.driver.watchdog import Watchdog
from rayapp.rollout.check import check_inputs
from rayapp.rollout.order import ANY_VERSION, Cohort, GroupRequest, evaluation_waves
from rayapp.runs.mirror.layout import CHECKPOINTS, EVALUATIONS, METRICS, TRAJECTORIES
from rayapp.runs.tracking.jsonl import JsonlTracker
from rayapp.runs.tracking.metrics import summarize_step
from rayapp.runs.tracking.pass_at_k import summarize_passes
from rayapp.runs.trajectories import writing_trajectories

log = logging.getLogger(__name__)


Record = Callable[[Sequence[Group]], None]
"""Keeps what was sampled, part after part. Blocks."""


def run_evaluation(config: Config, out: Path | None = None) -> dict[str, float]:
    """Everything behind `rayapp eval`: sample `config.eval.samples_per_task` completions per task and score them.

    Args:
        out: folder for what was sampled, which `rayapp view` shows; None keeps nothing.
    Returns:
        The metrics of a training step, over all samples.
    Raises:
        InputError: `out` holds a run that was trained.
    """
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
    """Metrics of the config's own model, by servers and rollout workers that are started for it alone."""
    async with open_cluster(config, with_learners=False, report=report) as cluster:
        return await evaluate(cluster, record=record)


async def evaluate(
    cluster: Cluster, version: int = 0, *, watchdog: Watchdog | None = None, record: Record | None = None
) -> dict[str, float]:
    """Every task, and every row of the evaluation files, on the weights that the servers hold now, which are `version`.

    Nothing of it is trained on.

    Args:
        watchdog: told of every prompt's end; None outside of a run.
        record: keeps the completions.
    """
    num_prompts = await cluster.rollout_worker(0).num_eval_prompts()
    summaries: list[GroupSummary] = []
    for wave in _waves(cluster.config, num_prompts):
        # All of a wave starts together where nothing else runs, so that the same weights give the same numbers.
        together = cluster.is_synchronous
        cohorts = [Cohort(place=place, size=len(wave)) if together else None for place in range(len(wave))]
        # A group of tasks: when one fails, none of the others may still be on the servers once the run goes on.
        found = await side_by_side(map(partial(_evaluate_prompt, cluster, version, watchdog), wave, cohorts))
        summaries += [group.summary for group in found]
        if record is not None:
            await _record(cluster, found, record)
    return summarize_step(summaries, version=version) | summarize_passes(summaries)


def _waves(config: Config, num_prompts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Source after source: each has its own number of samples, and what starts together has the same."""
    first = 0
    for source, number in zip(sources_of(config), num_prompts, strict=True):
        for wave in evaluation_waves(source.config, number):
            yield tuple(first + index for index in wave)
        first += number


async def _record(cluster: Cluster, found: Sequence[StoredGroup[Any]], record: Record) -> None:
    try:
        groups = await cluster.fetch_groups(found)
    except LearnersLostError as error:  # their node is gone; the numbers are here, and nothing is trained on the texts
        log.warning("the texts of %d evaluated prompts are not kept: %s", len(found), error)
        return
    await asyncio.to_thread(record, groups)


async def _evaluate_prompt(
    cluster: Cluster, step: int, watchdog: Watchdog | None, index: int, cohort: Cohort | None
) -> StoredGroup[Any]:
    summary, ref = await generate(
        cluster,
        GroupRequest(group_id=index, policy_version=ANY_VERSION, cohort=cohort, purpose="eval"),
        lambda worker, placed: worker.evaluate(placed, step),
        what=f"the evaluation of prompt {index}",
        watchdog=watchdog,
        reissue=lambda error: ANY_VERSION,
    )
    return StoredGroup(summary=summary, ref=ref)


async def validate(run: Run, step: int, phases: Phases) -> dict[str, float]:
    """Metrics of an evaluation as `eval/*`, on every `eval.every_steps`-th step and the last; nothing on others.

    Called between the weight sync and the release of the step's slots: in a synchronous run nothing else is on the
    servers then, so training samples the same tokens with and without it.
    """
    config = run.cluster.config
    every_steps = config.eval.every_steps
    if every_steps == 0 or not is_due(step, every_steps, last=config.train.num_steps):
        return {}
    with phases("eval"):
        return await evaluate_in_run(run, step)


async def evaluate_in_run(run: Run, step: int) -> dict[str, float]:
    """`eval/*` of the weights that the servers hold, after `step`; what they said is in the run folder."""
    with run.folder.recording_evaluation(step) as record:
        metrics = await evaluate(run.cluster, step, watchdog=run.watchdog, record=record)
    return {f"eval/{name}": value for name, value in metrics.items()}


@contextmanager
def evaluation_folder(config: Config, out: Path) -> Iterator[tuple[Record, Callable[[Mapping[str, float]], None]]]:
    """A folder like a run's, with one evaluation as its step 0: what keeps completions, and what keeps metrics.

    Raises:
        InputError: it holds a run that was trained.
    """
    if (out / TRAJECTORIES).exists() or (out / CHECKPOINTS).exists():
        raise InputError(f"{out} holds a run that was trained: choose another folder for its evaluation")
    (out / EVALUATIONS).mkdir(parents=True, exist_ok=True)
    write_text(out / "config.yaml", to_yaml(config))

    def keep(metrics: Mapping[str, float]) -> None:
        (out / METRICS).unlink(missing_ok=True)
        JsonlTracker(out / METRICS).log(0, {f"eval/{name}": value for name, value in metrics.items()})

    with writing_trajectories(out / EVALUATIONS / "step=000000.parquet", 0) as record:
        yield record, keep
