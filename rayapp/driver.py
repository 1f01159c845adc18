"""The GRPO loop. It holds scalars and object references; the work is in the actors.

    feed --> TrajectoryStore.reserve --> rollout-worker-i --> (summary, group_ref) --> TrajectoryStore
                                                                                          | take
             servers hold version+1 <-- sync_weights <-- learners.train_step(group_refs) <-'
                       '--> TrajectoryStore.release: only now may new groups start

`max_staleness: 0` makes this synchronous; larger values let `feed` run ahead. Nothing else differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from rayapp.best_metric import BestMetric
from rayapp.cluster import Cluster, open_cluster
from rayapp.config import Config
from rayapp.dynamic_sampling import DynamicSampling
from rayapp.errors import (
    DeadlineError,
    EngineDeadError,
    LearnersLostError,
    ObjectsLostError,
    ProcessDiedError,
    RestartsUsedUpError,
    StaleVersionError,
    TrainingAbortedError,
    WeightSyncError,
    first_error,
)
from rayapp.failures import FailureBudget
from rayapp.interrupts import run_until_done, uninterrupted
from rayapp.kept_groups import KeptGroups
from rayapp.logs import about, start_logs
from rayapp.phases import Phases
from rayapp.rollout.check import check_inputs
from rayapp.rollout.curriculum import Curriculum
from rayapp.rollout.order import GroupRequest, evaluation_waves
from rayapp.routing import Router
from rayapp.run_folder import RunFolder
from rayapp.saving import CheckpointSaver, saving
from rayapp.store import StoredGroup, TrajectoryStore
from rayapp.tracking.metrics import summarize_step
from rayapp.tracking.passes import summarize_passes
from rayapp.tracking.plots import write_reward_plot
from rayapp.tracking.trackers import RunTracker, make_trackers
from rayapp.types import GroupSummary
from rayapp.watchdog import Watchdog

Store = TrajectoryStore[object]
Kept = Callable[[], Awaitable[KeptGroups]]
MAX_ISSUES = 10
"""Of one group. Each process may be lost a few times, but not the same group with all of them."""
LOST_GROUP = (
    ProcessDiedError,
    EngineDeadError,
    StaleVersionError,
    WeightSyncError,
    DeadlineError,
    ObjectsLostError,
)
"""A group's worker, server, sandbox pool or node is gone, hangs, or was started again and is not ready."""


def run_training(config: Config) -> None:
    """Everything behind `rayapp train`: check, start the actors, train, export, end the actors.

    Raises:
        UserError: the model, a task, the run folder or the cluster can't be used; nothing was started, or all of it
            has ended.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the steps done are saved and the actors have ended.
    """
    start_logs(config)
    check_inputs(config, training=True)
    with RunFolder.open(config) as folder:
        if folder.is_finished:
            print(
                f"{folder.path} has its {config.train.num_steps} steps, and the model is in {folder.path / 'final'}. "
                "For more, raise train.num_steps; for another run, choose another run.name."
            )
            return
        run_until_done(_run(config, folder))


async def _run(config: Config, folder: RunFolder) -> None:
    with make_trackers(config, folder) as tracker:
        tracker.phase("starting")
        async with open_cluster(config, report=tracker.note) as cluster:
            tracker.add("ray metrics", cluster.metrics_tracker())
            await train_through_losses(config, cluster, folder, tracker)
            tracker.phase("exporting")
            await export_final(cluster, folder)
            tracker.note(f"final model: {folder.uri}/final")
    write_reward_plot(folder.path)


def run_evaluation(config: Config) -> dict[str, float]:
    """Everything behind `rayapp eval`: sample `config.eval.samples_per_task` completions per task and score them.

    Returns:
        The metrics of a training step, over all samples; nothing is written.
    """
    start_logs(config)
    check_inputs(config, training=False)
    return run_until_done(_evaluate_model(config))


async def _evaluate_model(config: Config) -> dict[str, float]:
    async with open_cluster(config, with_learners=False) as cluster:
        return await evaluate(cluster)


async def evaluate(cluster: Cluster, version: int = 0) -> dict[str, float]:
    """Every task, or every row of the evaluation files, on the weights that the servers hold now, which are `version`.

    Nothing of it is trained on.
    """
    num_prompts = await cluster.rollout_worker(0).num_eval_prompts()
    summaries: list[GroupSummary] = []
    for wave in evaluation_waves(cluster.config, num_prompts):
        # All of a wave starts together where nothing else runs, so that the same weights give the same numbers.
        cohort = wave if cluster.is_synchronous else ()
        summaries += await asyncio.gather(*(_evaluate_prompt(cluster, index, cohort, version) for index in wave))
    return summarize_step(summaries, version=version) | summarize_passes(summaries)


async def _evaluate_prompt(cluster: Cluster, index: int, cohort: tuple[int, ...], step: int) -> GroupSummary:
    """One prompt; again, once what it was lost with is replaced."""
    for _ in range(MAX_ISSUES):
        try:
            return await cluster.rollout_worker(index).evaluate(index, cohort, step)
        except LOST_GROUP:
            await cluster.supervisor.settled()
            cluster.check_weights()
            cohort = ()
    raise RestartsUsedUpError(f"the evaluation of prompt {index} was lost {MAX_ISSUES} times")


async def validate(cluster: Cluster, step: int, phases: Phases) -> dict[str, float]:
    """Metrics of an evaluation as `eval/*`, on every `eval.every_steps`-th step and the last; nothing on others.

    Called between the weight sync and the release of the step's slots: in a synchronous run nothing else is on the
    servers then, so training samples the same tokens with and without it.
    """
    every_steps = cluster.config.eval.every_steps
    if every_steps == 0 or not is_due(step, every_steps, last=cluster.config.train.num_steps):
        return {}
    with phases("eval"):
        metrics = await evaluate(cluster, step)
    return {f"eval/{name}": value for name, value in metrics.items()}


async def export_final(cluster: Cluster, folder: RunFolder) -> None:
    """`final/`: a Hugging Face folder of the last weights."""
    with folder.pending_final() as pending:
        await cluster.learners.export_hf(pending)


async def train_through_losses(config: Config, cluster: Cluster, folder: RunFolder, tracker: RunTracker) -> None:
    """`train`, and again from the last checkpoint with new learners whenever one was lost."""
    while True:
        try:
            return await train(config, cluster, folder, tracker)
        except LearnersLostError as error:
            tracker.note(f"lost the learners: {error} Starting them again from the last checkpoint.")
            await cluster.replace_learners(error)


async def train(config: Config, cluster: Cluster, folder: RunFolder, tracker: RunTracker) -> None:
    """Train from the last whole checkpoint, or from the model, to `config.train.num_steps`."""
    version, next_group_id, kept = await restore(cluster, folder)
    await cluster.sync_weights(version)
    if version == 0 and config.eval.before_training:
        tracker.phase("eval")
        tracker.log(0, {f"eval/{name}": value for name, value in (await evaluate(cluster)).items()})
    sampling = DynamicSampling(config.algorithm.dynamic_sampling)
    store: Store = TrajectoryStore(
        groups_per_step=config.train.groups_per_step,
        max_staleness=config.train.max_staleness,
        version=version,
        num_groups=(config.train.num_steps - version) * config.train.groups_per_step,
        next_group_id=next_group_id,
        straggler_window=straggler_window(config),
        waiting=cluster.put_groups(kept.waiting),
        done_ahead=kept.done_ahead,
        refuses=sampling.refuses,
    )
    curriculum = await open_curriculum(cluster, folder)
    saver = CheckpointSaver(
        cluster.learners,
        folder,
        asynchronous=config.checkpoint.asynchronous,
        files=curriculum.state if curriculum is not None else dict,
    )
    run = Run(
        cluster=cluster,
        folder=folder,
        tracker=tracker,
        store=store,
        saver=saver,
        sampling=sampling,
        failures=FailureBudget(config.rollout.max_failed_ratio),
        watchdog=_watchdog(cluster, folder, tracker),
        router=Router(len(cluster.servers), is_up=cluster.server_is_up),
        best=BestMetric(config),
        curriculum=curriculum,
    )
    async with (
        saving(saver),
        saving_when_stopped(saver, folder, store, partial(kept_groups, run)),
        unstalled(run.watchdog),
        feeding(run),
    ):
        for step in range(version + 1, config.train.num_steps + 1):
            phases = Phases(on_change=partial(_enter_phase, run))
            with about(step=step):
                with phases("rollout"), run.watchdog.waiting("driver", f"groups of step {step}"):
                    groups = await store.take(config.train.groups_per_step)
                # A stop waits for a step that has begun to train: half of one can't be saved.
                await uninterrupted(train_step(run, step, groups, phases))
        await saver.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What every step of a run works with."""

    cluster: Cluster
    folder: RunFolder
    tracker: RunTracker
    store: Store
    saver: CheckpointSaver
    sampling: DynamicSampling
    failures: FailureBudget
    watchdog: Watchdog
    router: Router
    best: BestMetric
    curriculum: Curriculum | None
    """None where prompts come in turn."""


def _enter_phase(run: Run, name: str) -> None:
    run.tracker.phase(name)
    run.watchdog.progress(f"driver entered {name}")


def _watchdog(cluster: Cluster, folder: RunFolder, tracker: RunTracker) -> Watchdog:
    async def dump() -> str:
        file = folder.path / "stacks.txt"
        file.write_text(await cluster.dump_stacks())
        return str(file)

    recovery = cluster.config.recovery
    return Watchdog(
        report_after_s=recovery.stall_report_s,
        stop_after_s=recovery.stall_stop_s,
        report=tracker.note,
        dump_stacks=dump,
    )


@asynccontextmanager
async def unstalled(watchdog: Watchdog) -> AsyncIterator[None]:
    """Stop the block when nothing goes on in it.

    Raises:
        StalledError: with who waits for what.
    """
    try:
        async with watchdog.watching():
            yield
    except BaseExceptionGroup as group:
        raise first_error(group) from group


async def train_step(run: Run, step: int, groups: Sequence[StoredGroup[object]], phases: Phases) -> None:
    """Train on the groups, give the servers the new weights, write the step down."""
    cluster, folder, store = run.cluster, run.folder, run.store
    summaries = tuple(group.summary for group in groups)
    run.failures.record(summaries)
    with phases("train"):
        await cluster.lend_gpus()
        learner_metrics = await cluster.learners.train_step(step, summaries, [group.ref for group in groups])
    with phases("weight_sync"):
        sync_metrics = await cluster.sync_weights(step)
    eval_metrics = await validate(cluster, step, phases)
    staleness_version = store.version
    if run.curriculum is not None:
        run.curriculum.end_step()  # before the slots of this step are free: their groups are drawn from what it taught
    await store.release(step)
    with phases("record"):
        fetched = await cluster.fetch_groups(groups)
        await folder.write_trajectories(step, fetched)
        run.tracker.trace(step, fetched)
    metrics = summarize_step(summaries, version=staleness_version) | learner_metrics | sync_metrics
    metrics |= run.sampling.step_metrics()
    score = run.best.score(metrics | eval_metrics)
    with phases("checkpoint"):
        checkpoint_metrics = await save_if_due(run, step, score)
    metrics |= (
        checkpoint_metrics
        | cluster.recovery_metrics()
        | eval_metrics
        | phases.metrics(summaries)
        | ledger_metrics(store)
        | run.router.metrics()
        | (run.curriculum.metrics() if run.curriculum is not None else {})
        | run.failures.metrics()
        | folder.storage_metrics()
    )
    run.tracker.log(step, metrics)


async def save_if_due(run: Run, step: int, score: float | None) -> dict[str, float]:
    """Hear of the save that is under way, and begin the one of this step. Returns metrics of one that ended."""
    config = run.cluster.config
    metrics = await run.saver.check()
    if is_due(step, config.checkpoint.every_steps, last=config.train.num_steps):
        # Before the copies of the state are made, and of one moment: what finishes meanwhile is generated again.
        next_group_id, kept = run.store.next_untrained_id, await kept_groups(run)
        await run.saver.begin(step, next_group_id=next_group_id, score=score, kept=kept)
    return metrics


async def nothing_kept() -> KeptGroups:
    """For those who have no store to keep anything of."""
    return KeptGroups()


@asynccontextmanager
async def saving_when_stopped(
    saver: CheckpointSaver, folder: RunFolder, store: Store, kept_groups: Kept = nothing_kept
) -> AsyncIterator[None]:
    """A run that is stopped (Ctrl-C, SIGTERM, `ray job stop`) saves the steps since its last checkpoint, then stops."""
    try:
        yield
    except asyncio.CancelledError:
        await saver.finish()
        last = folder.latest_checkpoint()
        if store.version > (last.version if last is not None else 0):
            next_group_id, kept = store.next_untrained_id, await kept_groups()
            await saver.begin(store.version, next_group_id=next_group_id, kept=kept)
            await saver.finish()
        raise
    except TrainingAbortedError:
        await saver.finish()
        raise


def straggler_window(config: Config) -> int:
    """Groups that may be trained before one that is still being generated."""
    window = config.train.straggler_window
    return config.train.groups_per_step if window is None else window


async def kept_groups(run: Run) -> KeptGroups:
    """What the checkpoint of now need not have generated again. A synchronous run repeats, so it keeps nothing."""
    if run.cluster.is_synchronous:
        return KeptGroups()
    done_ahead, waiting = run.store.done_ahead, run.store.waiting
    return KeptGroups(waiting=tuple(await run.cluster.fetch_groups(waiting)), done_ahead=done_ahead)


async def open_curriculum(cluster: Cluster, folder: RunFolder) -> Curriculum | None:
    """Of a run that begins, or goes on from its last checkpoint; None where prompts come in turn."""
    if not cluster.config.algorithm.curriculum.enabled:
        return None
    checkpoint = folder.latest_checkpoint()
    num_prompts = await cluster.rollout_worker(0).num_train_prompts()
    return Curriculum.open(cluster.config, num_prompts, checkpoint.path if checkpoint is not None else None)


async def restore(cluster: Cluster, folder: RunFolder) -> tuple[int, int, KeptGroups]:
    """Load the last whole checkpoint into the learners.

    Returns:
        Its version, the next group id, and the groups it kept; (0, 0, nothing) without one.
    """
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        folder.truncate_after(-1)
        return 0, 0, KeptGroups()
    version = await cluster.learners.load_checkpoint(checkpoint.path / "learner")
    folder.truncate_after(version)
    return version, checkpoint.next_group_id, KeptGroups.read(checkpoint.path)


def is_due(step: int, every_steps: int, *, last: int) -> bool:
    """True on every `every_steps`-th step (0: none of them) and on the last."""
    return step == last or (every_steps > 0 and step % every_steps == 0)


@asynccontextmanager
async def feeding(run: Run) -> AsyncIterator[None]:
    """Keep the store filled while the block runs; a failure in either ends both.

    Raises:
        RayappError: the first failure, not a group of them.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            feeder = tasks.create_task(feed(run), name="feed")
            yield
            feeder.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from group


async def feed(run: Run) -> None:
    """Start groups as the store admits them. Consumes: slots. Produces: finished groups."""
    async with asyncio.TaskGroup() as tasks:
        while True:
            ids, version = await run.store.reserve()
            # Only a synchronous run starts whole batches together; what trickles in must not wait for company.
            cohort = tuple(ids) if run.cluster.is_synchronous else ()
            for group_id in ids:
                prompt = run.curriculum.draw(group_id) if run.curriculum is not None else None
                request = GroupRequest(group_id=group_id, policy_version=version, cohort=cohort, prompt=prompt)
                with about(step=version + 1, group=group_id):
                    tasks.create_task(generate(run, request), name=f"group={group_id}")


async def generate(run: Run, request: GroupRequest) -> None:
    """One group, start to finish. One that is lost with a process is issued again once that process is replaced.

    Raises:
        RestartsUsedUpError: it was lost `MAX_ISSUES` times.
    """
    group_id, cluster = request.group_id, run.cluster
    for _ in range(MAX_ISSUES):
        try:
            worker = cluster.rollout_worker(group_id)
            with run.watchdog.waiting(f"group {group_id}", worker.name), run.router.placed(request) as placed:
                summary, ref = await worker.run_group(placed)
        except LOST_GROUP as error:
            version = run.store.reissue(group_id, type(error).__name__)
            run.tracker.note(f"group {group_id} is issued again: {error}")
            await cluster.supervisor.settled()
            cluster.check_weights()
            # Alone: the others of its cohort may be done, or be on their way from another server.
            request = GroupRequest(group_id=group_id, policy_version=version, prompt=request.prompt)
        else:
            if run.curriculum is not None:
                run.curriculum.record(request.place, summary)
            return await run.store.finish(summary, ref)
    raise RestartsUsedUpError(f"group {group_id} was lost {MAX_ISSUES} times; see the notes above for the reasons")


def ledger_metrics(store: Store) -> dict[str, float]:
    """Groups by state, and how long the oldest that is ready has waited.

    Raises:
        AssertionError: a group was lost or counted twice.
    """
    ledger = store.ledger()
    assert ledger.balances(), f"the ledger does not balance: {ledger}"
    counts = {"admitted", "ready", "training", "trained", "dropped", "issued"}
    queue = {"queue/oldest_ready_s": store.oldest_ready_s(), "ledger/reissued": float(store.reissued_for.total())}
    dropped = {f"ledger/dropped/{reason}": float(count) for reason, count in sorted(store.dropped_for.items())}
    return queue | dropped | {f"ledger/{name}": float(getattr(ledger, name)) for name in sorted(counts)}
