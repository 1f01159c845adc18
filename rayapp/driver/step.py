"""One step of a run: train on the groups, give the servers the new weights, write everything down.

    groups --> learners.train_step --> sync_weights --> TrajectoryStore.release: only now may new groups start
           '--> trajectories, traces, metrics, a checkpoint when one is due

Called by the driver, step after step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

from rayapp.core.machine import trim_heap
from rayapp.driver.evaluation import validate
from rayapp.driver.phases import Phases
from rayapp.driver.run import Run, Store
from rayapp.driver.saving import is_due
from rayapp.driver.store import StoredGroup
from rayapp.driver.watchdog import unstalled
from rayapp.runs.kept_groups import KeptGroups
from rayapp.runs.tracking.metrics import summarize_step


def step_phases(run: Run) -> Phases:
    """Clocks of a step's phases; each that begins is shown, and is progress."""
    return Phases(on_change=partial(_enter_phase, run))


def _enter_phase(run: Run, name: str) -> None:
    run.tracker.phase(name)
    run.watchdog.progress(f"driver entered {name}")


async def train_step(run: Run, step: int, groups: Sequence[StoredGroup[object]], phases: Phases) -> dict[str, float]:
    """Train on the groups, give the servers the new weights, write the step down.

    Returns:
        All metrics of the step.
    Raises:
        StalledError: a part of it hangs.
    """
    async with unstalled(run.watchdog, f"the end of step {step}"):
        return await _train_step(run, step, groups, phases)


async def _train_step(run: Run, step: int, groups: Sequence[StoredGroup[object]], phases: Phases) -> dict[str, float]:
    summaries = tuple(group.summary for group in groups)
    run.failures.record((*summaries, *run.sampling.take_dropped()))
    learned = await _learn(run, step, groups, phases)
    evaluated = await validate(run, step, phases)
    sampled_by = run.store.version
    if run.curriculum is not None:
        run.curriculum.end_step()  # before the slots of this step are free: their groups are drawn from what it taught
    await run.store.release(step)
    with phases("record"):
        fetched = await run.cluster.fetch_groups(groups)
        if run.cluster.config.tracking.trajectories:
            await run.folder.write_trajectories(step, fetched, await run.cluster.learners.log_probs_before(step))
        run.tracker.trace(step, fetched)
        del fetched
        await asyncio.to_thread(trim_heap)
    metrics = summarize_step(summaries, version=sampled_by) | learned | run.sampling.step_metrics()
    score = run.best.score(metrics | evaluated)
    with phases("checkpoint"):
        saved = await save_if_due(run, step, score)
    metrics |= saved | evaluated | phases.metrics(summaries) | _state_metrics(run)
    run.tracker.log(step, metrics)
    return metrics


async def _learn(run: Run, step: int, groups: Sequence[StoredGroup[object]], phases: Phases) -> dict[str, float]:
    """An optimizer step, and its weights on the servers. Returns the metrics of both."""
    cluster = run.cluster
    with phases("train"):
        await cluster.lend_gpus()
        learned = await cluster.learners.train_step(
            step, tuple(group.summary for group in groups), [group.ref for group in groups]
        )
    with phases("weight_sync"):
        return learned | await cluster.sync_weights(step)


def _state_metrics(run: Run) -> dict[str, float]:
    """Where the run stands, apart from what the step's groups say."""
    return (
        run.cluster.recovery_metrics()
        | ledger_metrics(run.store)
        | run.cluster.router.metrics()
        | (run.curriculum.metrics() if run.curriculum is not None else {})
        | run.failures.metrics()
        | run.folder.storage_metrics()
    )


async def save_if_due(run: Run, step: int, score: float | None) -> dict[str, float]:
    """Hear of the save that is under way, and begin the one of this step. Returns metrics of one that ended."""
    config = run.cluster.config
    metrics = await run.saver.check()
    if is_due(step, config.checkpoint.every_steps, last=config.train.num_steps):
        await begin_checkpoint(run, step, score=score)
    return metrics


async def begin_checkpoint(run: Run, version: int, *, score: float | None = None) -> None:
    """Start to save the store's version, with what need not be generated again. A synchronous run repeats: nothing.

    All of it is of one moment, before the first wait: what finishes meanwhile is generated again.
    """
    store, next_group_id = run.store, run.store.next_untrained_id
    waiting, done_ahead = ([], ()) if run.cluster.is_synchronous else (store.waiting, store.done_ahead)
    kept_ids = {*done_ahead, *(group.summary.group_id for group in waiting)}
    files: dict[str, str] = {}
    if run.curriculum is not None:
        files = run.curriculum.state(lambda group_id: group_id < next_group_id or group_id in kept_ids)
    kept = KeptGroups(waiting=tuple(await run.cluster.fetch_groups(waiting)), done_ahead=done_ahead)
    await run.saver.begin(version, next_group_id=next_group_id, score=score, kept=kept, files=files)


def ledger_metrics(store: Store) -> dict[str, float]:
    """Groups by state, and how long the oldest that is ready has waited.

    Raises:
        AssertionError: a group was lost or counted twice.
    """
    ledger = store.ledger()
    assert ledger.balances(), f"the ledger does not balance: {ledger}"
    queue = {"queue/oldest_ready_s": store.oldest_ready_s(), "ledger/reissued": float(store.reissued_for.total())}
    dropped = {f"ledger/dropped/{reason}": float(count) for reason, count in sorted(store.dropped_for.items())}
    return queue | dropped | {f"ledger/{name}": float(count) for name, count in sorted(asdict(ledger).items())}
