"""The GRPO loop. It holds scalars and object references; the work is in the actors.

    feed --> TrajectoryStore.reserve --> rollout-worker-i --> (summary, group_ref) --> TrajectoryStore
                                                                                          | take
             servers hold version+1 <-- sync_weights <-- learners.train_step(group_refs) <-'
                       '--> TrajectoryStore.release: only now may new groups start

`max_staleness: 0` makes this synchronous; larger values let `feed` run ahead. Nothing else differs. Feeding is in
`rayapp.driver.feeding`, what a step does in `rayapp.driver.step`, what it works with in `rayapp.driver.run`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from rayapp.config.config import Config
from rayapp.core.aio import finish_then_cancel, is_stopping, run_until_done
from rayapp.core.errors import LearnersLostError, StopTraining
from rayapp.core.logs import about, start_logs
from rayapp.driver.cluster import Cluster, one_connection, open_cluster
from rayapp.driver.evaluation import evaluate_in_run
from rayapp.driver.feeding import feeding
from rayapp.driver.offline.sft import warm_up
from rayapp.driver.run import Run, open_run
from rayapp.driver.saving import saving, saving_when_stopped, saying_what_is_saved
from rayapp.driver.step import begin_checkpoint, step_phases, train_step
from rayapp.driver.watchdog import unstalled
from rayapp.rollout.check import check_inputs
from rayapp.runs.folder import RunFolder
from rayapp.runs.plots import write_reward_plot
from rayapp.runs.tracking.trackers import RunTracker, make_trackers

OnStep = Callable[[int, Mapping[str, float]], Awaitable[None] | None]
"""Told of each step with its metrics. May raise `StopTraining`; whatever it raises, the step is saved first."""


def run_training(config: Config, on_step: OnStep | None = None) -> None:
    """Everything behind `rayapp train`: check, warm up, start the actors, train, export, end the actors.

    Raises:
        UserError: the model, a task, the run folder or the cluster can't be used; nothing was started, or all of it
            has ended.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the steps done are saved and the actors have ended.
    """
    start_logs(config.run.name, config.tracking.log_format)
    check_inputs(config, training=True)
    with RunFolder.open(config) as folder:
        if folder.is_finished:
            print(
                f"{folder.uri} has its {config.train.num_steps} steps, and the model is in {folder.uri}/final. "
                "For more, raise train.num_steps, if the learning rate is constant; for another run, choose another "
                "run.name."
            )
            return
        with one_connection():
            if config.warmup.num_steps:
                config = warm_up(config)
            run_until_done(_run(config, folder, on_step))


async def _run(config: Config, folder: RunFolder, on_step: OnStep | None = None) -> None:
    with make_trackers(config, folder) as tracker, saying_what_is_saved(folder, tracker.note):
        tracker.phase("starting")
        async with open_cluster(config, report=tracker.note) as cluster:
            tracker.add("ray metrics", cluster.metrics_tracker())
            step = await train_through_losses(config, cluster, folder, tracker, on_step)
            tracker.phase("exporting")
            with folder.pending_final(step) as pending:
                await cluster.learners.export_hf(pending)
            tracker.note(f"final model: {folder.uri}/final; look at the run with: rayapp view {folder.uri}")
    write_reward_plot(folder.path)


async def train_through_losses(
    config: Config, cluster: Cluster, folder: RunFolder, tracker: RunTracker, on_step: OnStep | None = None
) -> int:
    """`train`, and again from the last checkpoint with new learners whenever one was lost."""
    while True:
        try:
            return await train(config, cluster, folder, tracker, on_step)
        except LearnersLostError as error:
            if is_stopping():
                raise asyncio.CancelledError from error
            tracker.note(f"lost the learners: {error} Starting them again from the last checkpoint.")
            started = time.monotonic()
            await cluster.replace_learners(error)
            restarts = cluster.num_learner_restarts
            tracker.note(f"replaced the learners after {time.monotonic() - started:.1f} s (restart {restarts})")


async def train(
    config: Config, cluster: Cluster, folder: RunFolder, tracker: RunTracker, on_step: OnStep | None = None
) -> int:
    """Train from the last whole checkpoint, or from the model, to `config.train.num_steps`.

    Returns:
        The last step: that one, or the one at which `on_step` raised StopTraining.
    """
    run = await open_run(cluster, folder, tracker)
    version = run.store.version
    await cluster.sync_weights(version)
    if version == 0 and config.eval.before_training:
        tracker.phase("eval")
        tracker.log(0, await evaluate_in_run(run, 0))
    async with (
        saving(run.saver),
        saving_when_stopped(run.saver, folder, run.store, partial(begin_checkpoint, run)),
        feeding(run),
    ):
        run.watchdog.progress("the start")
        step = version
        while step < config.train.num_steps:
            step += 1
            metrics = await _take_and_train(run, step)
            if on_step is not None and await _is_over(run, step, metrics, on_step):
                tracker.note(f"on_step stops the run after step {step}")
                break
        async with unstalled(run.watchdog, "the last checkpoint"):
            await run.saver.finish()
    return step


async def _is_over(run: Run, step: int, metrics: Mapping[str, float], on_step: OnStep) -> bool:
    """Tell a program of the step. True if it wants no more; then, and if it fails, the step is saved."""
    try:
        told = on_step(step, metrics)
        if told is not None:
            await told
        return False
    except StopTraining:
        await _save_now(run, step)
        return True
    except Exception:
        await _save_now(run, step)
        raise


async def _save_now(run: Run, step: int) -> None:
    await run.saver.finish()
    last = run.folder.checkpoints.latest()
    if last is None or last.version < step:
        await begin_checkpoint(run, step)
        await run.saver.finish()


async def _take_and_train(run: Run, step: int) -> dict[str, float]:
    phases = step_phases(run)
    with about(step=step):
        with phases("rollout"):
            async with unstalled(run.watchdog, f"groups of step {step}"):
                groups = await run.store.take(run.cluster.config.train.groups_per_step)
        # A stop waits for a step that has begun to train: half of one can't be saved.
        return await finish_then_cancel(train_step(run, step, groups, phases))
