"""What every step of a run works with, put together once, by the driver. Used by `rayapp.driver.feeding` and
`rayapp.driver.step`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rayapp.config.config import Config
from rayapp.core.errors import CheckpointDamagedError, CheckpointError
from rayapp.driver.cluster import Cluster, LearnerGroup
from rayapp.driver.dynamic_sampling import DynamicSampling
from rayapp.driver.failures import FailureBudget
from rayapp.driver.saving import CheckpointSaver
from rayapp.driver.store import TrajectoryStore
from rayapp.driver.watchdog import Watchdog, stacks_of_this_process
from rayapp.rollout.curriculum import Curriculum
from rayapp.runs.best_metric import BestMetric
from rayapp.runs.folder import RunFolder
from rayapp.runs.kept_groups import KeptGroups
from rayapp.runs.tracking.trackers import RunTracker

Store = TrajectoryStore[object]


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
    best: BestMetric
    curriculum: Curriculum | None
    """None where prompts come in turn."""


async def open_run(cluster: Cluster, folder: RunFolder, tracker: RunTracker) -> Run:
    """A run where its last whole checkpoint left it; the learners hold its weights, the servers do not yet."""
    config = cluster.config
    version, next_group_id, kept = await restore(cluster.learners, folder, note=tracker.note)
    sampling = DynamicSampling(config.algorithm.dynamic_sampling)
    curriculum = await open_curriculum(cluster, folder)
    return Run(
        cluster=cluster,
        folder=folder,
        tracker=tracker,
        store=_open_store(cluster, version, next_group_id, kept, sampling),
        saver=CheckpointSaver(cluster.learners, folder, asynchronous=config.checkpoint.asynchronous),
        sampling=sampling,
        failures=FailureBudget(config.rollout.max_failed_ratio),
        watchdog=_watchdog(cluster, folder, tracker),
        best=BestMetric(config),
        curriculum=curriculum,
    )


def _open_store(
    cluster: Cluster, version: int, next_group_id: int, kept: KeptGroups, sampling: DynamicSampling
) -> Store:
    train = cluster.config.train
    return TrajectoryStore(
        groups_per_step=train.groups_per_step,
        max_staleness=train.max_staleness,
        version=version,
        num_groups=(train.num_steps - version) * train.groups_per_step,
        next_group_id=next_group_id,
        straggler_window=straggler_window(cluster.config),
        waiting=cluster.put_groups(kept.waiting),
        done_ahead=kept.done_ahead,
        refuses=sampling.refuses,
    )


def straggler_window(config: Config) -> int:
    """Groups that may be trained before one that is still being generated."""
    window = config.train.straggler_window
    return config.train.groups_per_step if window is None else window


async def open_curriculum(cluster: Cluster, folder: RunFolder) -> Curriculum | None:
    """The curriculum of a run that begins or goes on from its last checkpoint; None where prompts come in turn."""
    if not cluster.config.algorithm.curriculum.enabled:
        return None
    checkpoint = folder.checkpoints.latest()
    num_prompts = await cluster.rollout_worker(0).num_train_prompts()
    return Curriculum.open(cluster.config, num_prompts, checkpoint.path if checkpoint is not None else None)


async def restore(
    learners: LearnerGroup, folder: RunFolder, *, note: Callable[[str], None]
) -> tuple[int, int, KeptGroups]:
    """Load the last whole checkpoint into the learners; one whose weights are no numbers is refused for the one before.

    Returns:
        Its version, the next group id, and the groups it kept; (0, 0, nothing) without one.
    Raises:
        CheckpointError: it is of another model, or of another step than it says.
        RunFolderError: there are checkpoints, and none of them can be used.
    """
    while (checkpoint := await asyncio.to_thread(folder.checkpoints.verified)) is not None:
        try:
            version = await learners.load_checkpoint(checkpoint.path / "learner")
        except CheckpointDamagedError as error:
            folder.checkpoints.refuse(checkpoint, str(error))
            continue
        if version != checkpoint.version:
            raise CheckpointError(f"{checkpoint.path} holds the weights of step {version}: delete it, or its run.")
        kept = await asyncio.to_thread(KeptGroups.read, checkpoint.path)
        folder.truncate_after(version)
        note(f"resumed from step {version} ({checkpoint.path})")
        return version, checkpoint.next_group_id, kept
    folder.truncate_after(-1)
    return 0, 0, KeptGroups()


def _watchdog(cluster: Cluster, folder: RunFolder, tracker: RunTracker) -> Watchdog:
    async def dump() -> str:
        file = folder.path / "stacks.txt"
        text = f"{stacks_of_this_process()}\n{await cluster.dump_stacks()}"
        await asyncio.to_thread(file.write_text, text)
        return str(file)

    recovery = cluster.config.recovery
    return Watchdog(
        report_after_s=recovery.stall_report_s,
        stop_after_s=recovery.stall_stop_s,
        report=tracker.note,
        dump_stacks=dump,
    )
