"""The GRPO loop of the driver. It holds only scalars and object references; actors do the work.

    feed --> TrajectoryStore.reserve --> rollout-worker-i --> (summary, group_ref) --> TrajectoryStore
                                                                                          | take
             servers hold version+1 <-- sync_weights <-- learners.train_step(group_refs) <-'
                       '--> TrajectoryStore.release: only now may new groups start

`max_staleness: 0` makes this synchronous; larger values let `feed` run ahead. Nothing else differs. A step trains on
the groups, sends the servers the new weights, and writes trajectories, traces, metrics, and a checkpoint when one is
due. `rayapp.driver.feeding` starts the groups; `rayapp.driver.run` has the objects that a step uses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial

from rayapp.config.config import Config
from rayapp.config.keys import LACKS_BASELINE
from rayapp.core.aio import finish_then_cancel, is_stopping, run_until_done, when_stopped
from rayapp.core.errors import LearnersLostError, StopTraining
from rayapp.core.logs import about, start_logs, tracebacks_in
from rayapp.core.machine import trim_heap
from rayapp.core.timing import Phases
from rayapp.driver.budget import within_budget
from rayapp.driver.cluster import Cluster, one_connection, open_cluster
from rayapp.driver.evaluation import evaluate_in_run, validate
from rayapp.driver.feeding import feeding
from rayapp.driver.run import Store, Training, open_run, profiling_server, score_of, write_profiles
from rayapp.driver.saving import is_due, saving, saving_when_stopped, saying_what_is_saved
from rayapp.driver.serving import serve_command
from rayapp.driver.sft import warm_up
from rayapp.driver.store import StoredGroup
from rayapp.driver.watchdog import unstalled
from rayapp.rollout.check import check_inputs
from rayapp.rollout.container_images import PromptImages, each_once, images_of_prompts, with_pinned_images
from rayapp.runs.checkpoints import KeptGroups
from rayapp.runs.folder import RunFolder
from rayapp.runs.plots import write_reward_plot
from rayapp.runs.tracking.metrics import summarize_step
from rayapp.runs.tracking.trackers import RunTracker, make_trackers


def step_phases(run: Training) -> Phases:
    """Return the timers of a step's phases. The start of each phase is displayed, and counts as progress."""
    return Phases(on_change=partial(_enter_phase, run))


def _enter_phase(run: Training, name: str) -> None:
    run.tracker.phase(name)
    run.watchdog.progress(f"driver entered {name}")


async def train_step(
    run: Training, step: int, groups: Sequence[StoredGroup[object]], phases: Phases
) -> dict[str, float]:
    """Train on the groups, send the servers the new weights, and record the step. Return all metrics of the step."""
    async with unstalled(run.watchdog, f"the end of step {step}"):
        return await _train_step(run, step, groups, phases)


async def _train_step(
    run: Training, step: int, groups: Sequence[StoredGroup[object]], phases: Phases
) -> dict[str, float]:
    summaries = tuple(group.summary for group in groups)
    everything = (*summaries, *run.sampling.take_dropped())
    if late := sum(kind == "deadline" for summary in everything for kind in summary.failure_kinds):
        run.tracker.note(
            f"step {step}: {late} trajectories were dropped because they took longer than rollout.group_deadline_s = "
            f"{run.cluster.config.group_deadline_s:g}. The longest trajectories are missing, which biases training. "
            "Raise rollout.group_deadline_s."
        )
    run.failures.record(everything)
    learned = await _learn(run, step, groups, phases)
    evaluated = await validate(run, step, phases)
    sampled_by = run.store.version
    await run.store.release(step)
    with phases("record"):
        fetched = await run.cluster.fetch_groups(groups)
        await run.folder.write_trajectories(step, fetched, await run.cluster.learners.log_probs_before(step))
        run.tracker.trace(step, fetched)
        del fetched
        await asyncio.to_thread(trim_heap)
    metrics = summarize_step(summaries, version=sampled_by) | learned | run.sampling.step_metrics()
    score = score_of(run.cluster.config, metrics | evaluated)
    with phases("checkpoint"):
        saved = await save_if_due(run, step, score)
    metrics |= saved | evaluated | phases.metrics(summaries) | _state_metrics(run)
    if run.cluster.num_gpus:
        per_s = metrics["tokens/total"] / metrics["timing_s/step"]
        metrics["throughput/tokens_per_s_per_gpu"] = per_s / run.cluster.num_gpus  # as NeMo-RL counts
    run.tracker.log(step, metrics)
    await write_profiles(run, step)
    return metrics


async def _learn(run: Training, step: int, groups: Sequence[StoredGroup[object]], phases: Phases) -> dict[str, float]:
    cluster = run.cluster
    with phases("train"):
        await cluster.lend_gpus()
        cluster.learners.on_progress = run.tracker.progress
        learned = await cluster.learners.train_step(
            step, tuple(group.summary for group in groups), [group.ref for group in groups]
        )
    with phases("weight_sync"):
        return learned | await cluster.sync_weights(step)


def _state_metrics(run: Training) -> dict[str, float]:
    return (
        run.cluster.recovery_metrics()
        | ledger_metrics(run.store)
        | run.cluster.router.metrics()
        | run.failures.metrics()
        | run.folder.storage_metrics()
    )


async def save_if_due(run: Training, step: int, score: float | None) -> dict[str, float]:
    """Check the save in progress, and begin one if a checkpoint is due. Return metrics of a save that ended."""
    config = run.cluster.config
    metrics = await run.saver.check()
    if is_due(step, config.checkpoint.every_steps, last=config.train.num_steps):
        await begin_checkpoint(run, step, score=score)
    return metrics


async def begin_checkpoint(run: Training, version: int, *, score: float | None = None) -> None:
    """Begin to save a policy version, with the store's finished groups, which a resumed run need not generate again.

    A synchronous run keeps none. The state is read at one moment, before the first await.
    """
    store, next_group_id = run.store, run.store.next_untrained_id
    waiting, done_ahead = ([], ()) if run.cluster.is_synchronous else (store.waiting, store.done_ahead)
    kept = KeptGroups(waiting=tuple(await run.cluster.fetch_groups(waiting)), done_ahead=done_ahead)
    await run.saver.begin(version, next_group_id=next_group_id, score=score, kept=kept)


def ledger_metrics(store: Store) -> dict[str, float]:
    """Return the number of groups by state, and the seconds that the oldest ready group has waited."""
    ledger = store.ledger()
    assert ledger.balances(), f"the ledger does not balance: {ledger}"
    queue = {"queue/oldest_ready_s": store.oldest_ready_s(), "ledger/reissued": float(store.reissued_for.total())}
    dropped = {f"ledger/dropped/{reason}": float(count) for reason, count in sorted(store.dropped_for.items())}
    return queue | dropped | {f"ledger/{name}": float(count) for name, count in sorted(asdict(ledger).items())}


log = logging.getLogger(__name__)
# Function of each step and its metrics, which ends the run by StopTraining; after any error the step is saved.
OnStep = Callable[[int, Mapping[str, float]], Awaitable[None] | None]


def run_training(config: Config, on_step: OnStep | None = None) -> None:
    """Run `rayapp train`: check, warm up, start the actors, train, export, end the actors. On Ctrl-C or SIGTERM the
    steps done are saved and the actors have ended when KeyboardInterrupt comes out."""
    start_logs(config.run.name, config.tracking.log_format)
    check_inputs(config, training=True)
    if config.lacks_baseline:
        log.warning(LACKS_BASELINE)
    with RunFolder.open(config) as folder:
        if folder.is_finished:
            print(
                f"{folder.uri} has completed its {config.train.num_steps} steps; the model is in {folder.uri}/final. "
                "If the learning rate is constant, raise train.num_steps to train more steps. For a new run, choose "
                "another run.name."
            )
            return
        # Enter tracebacks_in first: when the connection closes, Ray logs the unread errors of lost groups.
        with tracebacks_in(folder.path / "faults.log", log.warning), one_connection():
            warmup_cost = 0.0
            if config.warmup.num_steps:
                config, warmup_cost = warm_up(config)
            images = images_of_prompts(config)
            all_images = each_once((*images, *images_of_prompts(config, held_out=True)))
            pinned = with_pinned_images(config.sandbox, all_images, folder.path / "images.json")
            config = config.model_copy(update={"sandbox": pinned})
            run_until_done(_run(config, folder, warmup_cost, on_step, images))


async def _run(
    config: Config, folder: RunFolder, warmup_cost: float, on_step: OnStep | None, images: Sequence[PromptImages]
) -> None:
    with make_trackers(config, folder) as tracker, saying_what_is_saved(folder, tracker.note):
        tracker.phase("starting")
        async with (
            within_budget(config, folder, tracker, warmup=warmup_cost) as on_lease,
            open_cluster(config, report=tracker.note, on_lease=on_lease, images=images) as cluster,
        ):
            tracker.add("ray metrics", cluster.metrics_tracker())
            step = await train_through_losses(config, cluster, folder, tracker, on_step)
            tracker.phase("exporting")
            with folder.pending_final(step) as pending:
                await cluster.export_hf(pending)
            tracker.note(f"final model: {folder.uri}/final; look at the run with: rayapp view {folder.uri}")
            tracker.note(f"serve it with: {await asyncio.to_thread(serve_command, config, f'{folder.uri}/final')}")
    write_reward_plot(folder.path)


async def train_through_losses(
    config: Config, cluster: Cluster, folder: RunFolder, tracker: RunTracker, on_step: OnStep | None = None
) -> int:
    """Call `train`; when learners are lost, start new ones and train again from the last checkpoint."""
    while True:
        try:
            return await train(config, cluster, folder, tracker, on_step)
        except LearnersLostError as error:
            if is_stopping():
                raise asyncio.CancelledError from error
            tracker.note(f"lost the learners: {error} Restarting them from the last checkpoint.")
            started = time.monotonic()
            await cluster.replace_learners(error)
            restarts = cluster.num_learner_restarts
            tracker.note(f"replaced the learners after {time.monotonic() - started:.1f} s (restart {restarts})")


async def train(
    config: Config, cluster: Cluster, folder: RunFolder, tracker: RunTracker, on_step: OnStep | None = None
) -> int:
    """Train from the last complete checkpoint, or from the start model. Return the last step: `num_steps`, or that at
    which `on_step` raised StopTraining."""
    run = await open_run(cluster, folder, tracker)
    when_stopped(run.stopping.set)
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


async def _is_over(run: Training, step: int, metrics: Mapping[str, float], on_step: OnStep) -> bool:
    """Call `on_step`; after any error, also StopTraining, the step is saved."""
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


async def _save_now(run: Training, step: int) -> None:
    await run.saver.finish()
    last = run.folder.checkpoints.latest()
    if last is None or last.version < step:
        await begin_checkpoint(run, step)
        await run.saver.finish()


async def _take_and_train(run: Training, step: int) -> dict[str, float]:
    phases = step_phases(run)
    with about(step=step):
        with phases("rollout"):
            async with unstalled(run.watchdog, f"groups of step {step}"), profiling_server(run, step):
                groups = await run.store.take(run.cluster.config.train.groups_per_step)
        # A stop waits for a step that has begun to train, because half a step can't be saved.
        return await finish_then_cancel(train_step(run, step, groups, phases))
