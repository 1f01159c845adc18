"""Evaluations: of a model alone (`rayapp eval`), and of the weights of a run between two steps. They train nothing.

Called by the CLI and by the driver's step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rayapp.config.config import Config, sources_of
from rayapp.core.aio import run_until_done
from rayapp.core.errors import one_error
from rayapp.core.logs import start_logs
from rayapp.core.types import GroupSummary
from rayapp.driver.cluster import Cluster, open_cluster
from rayapp.driver.lost_groups import generate
from rayapp.driver.phases import Phases
from rayapp.driver.run import Run
from rayapp.driver.saving import is_due
from rayapp.driver.watchdog import Watchdog
from rayapp.rollout.check import check_inputs
from rayapp.rollout.order import ANY_VERSION, Cohort, GroupRequest, evaluation_waves
from rayapp.runs.tracking.metrics import summarize_step
from rayapp.runs.tracking.pass_at_k import summarize_passes


def run_evaluation(config: Config) -> dict[str, float]:
    """Everything behind `rayapp eval`: sample `config.eval.samples_per_task` completions per task and score them.

    Returns:
        The metrics of a training step, over all samples; nothing is written.
    """
    start_logs(config.run.name, config.tracking.log_format)
    check_inputs(config, training=False)
    return run_until_done(evaluate_model(config))


async def evaluate_model(config: Config, *, report: Callable[[str], None] = lambda text: None) -> dict[str, float]:
    """Metrics of the config's own model, by servers and rollout workers that are started for it alone."""
    async with open_cluster(config, with_learners=False, report=report) as cluster:
        return await evaluate(cluster)


async def evaluate(cluster: Cluster, version: int = 0, *, watchdog: Watchdog | None = None) -> dict[str, float]:
    """Every task, and every row of the evaluation files, on the weights that the servers hold now, which are `version`.

    Nothing of it is trained on.

    Args:
        watchdog: told of every prompt's end; None outside of a run.
    """
    num_prompts = await cluster.rollout_worker(0).num_eval_prompts()
    summaries: list[GroupSummary] = []
    for wave in _waves(cluster.config, num_prompts):
        # All of a wave starts together where nothing else runs, so that the same weights give the same numbers.
        together = cluster.is_synchronous
        cohorts = [Cohort(place=place, size=len(wave)) if together else None for place in range(len(wave))]
        # A group of tasks: when one fails, none of the others may still be on the servers once the run goes on.
        with one_error():
            async with asyncio.TaskGroup() as tasks:
                evaluate_prompt = partial(_evaluate_prompt, cluster, version, watchdog)
                running = [tasks.create_task(work) for work in map(evaluate_prompt, wave, cohorts)]
        summaries += [task.result() for task in running]
    return summarize_step(summaries, version=version) | summarize_passes(summaries)


def _waves(config: Config, num_prompts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Source after source: each has its own number of samples, and what starts together has the same."""
    first = 0
    for source, number in zip(sources_of(config), num_prompts, strict=True):
        for wave in evaluation_waves(source.config, number):
            yield tuple(first + index for index in wave)
        first += number


async def _evaluate_prompt(
    cluster: Cluster, step: int, watchdog: Watchdog | None, index: int, cohort: Cohort | None
) -> GroupSummary:
    return await generate(
        cluster,
        GroupRequest(group_id=index, policy_version=ANY_VERSION, cohort=cohort, purpose="eval"),
        lambda worker, placed: worker.evaluate(placed, step),
        what=f"the evaluation of prompt {index}",
        watchdog=watchdog,
        reissue=lambda error: ANY_VERSION,
    )


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
        metrics = await evaluate(run.cluster, step, watchdog=run.watchdog)
    return {f"eval/{name}": value for name, value in metrics.items()}
