"""Opens a run: makes the objects that every step uses, and restores the last checkpoint."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from rayapp.config.config import Config
from rayapp.config.sections import TrainSection
from rayapp.core.errors import (
    CheckpointDamagedError,
    CheckpointError,
    LearnersLostError,
    RayappError,
    StorageFullError,
)
from rayapp.core.timing import Profile
from rayapp.driver.cluster import Cluster, LearnerGroup
from rayapp.driver.group_rules import DynamicSampling, FailureBudget
from rayapp.driver.saving import CheckpointSaver
from rayapp.driver.store import TrajectoryStore
from rayapp.driver.watchdog import Watchdog, stacks_of_this_process
from rayapp.runs.checkpoints import KeptGroups
from rayapp.runs.folder import RunFolder, note_machine
from rayapp.runs.layout import PROFILES
from rayapp.runs.profiles import write_profile
from rayapp.runs.tracking.trackers import RunTracker


def score_of(config: Config, metrics: Mapping[str, float]) -> float | None:
    """Return the score by which `checkpoint.keep_best` ranks the checkpoint of the step with these metrics; None if the
    step has no finite one, e.g. no evaluation."""
    value = metrics.get("eval/reward/mean" if config.eval.every_steps else "reward/mean")
    return value if value is not None and math.isfinite(value) else None


Store = TrajectoryStore[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    cluster: Cluster
    folder: RunFolder
    tracker: RunTracker
    store: Store
    saver: CheckpointSaver
    sampling: DynamicSampling
    failures: FailureBudget
    watchdog: Watchdog
    profiles: list[Profile] = field(default_factory=list)  # of the present step, if it is in `train.profile_steps`
    stopping: asyncio.Event = field(default_factory=asyncio.Event)  # set at Ctrl-C, while the step that has begun ends


async def open_run(cluster: Cluster, folder: RunFolder, tracker: RunTracker) -> Training:
    """Open a run at its last complete checkpoint. The learners then hold its weights; the servers don't yet."""
    config, learners = cluster.config, cluster.learners
    note_machine(folder.path, learners.config, learners.processor, note=tracker.note)
    version, next_group_id, kept = await restore(cluster.learners, folder, note=tracker.note)
    sampling = DynamicSampling(config.algorithm.dynamic_sampling)
    return Training(
        cluster=cluster,
        folder=folder,
        tracker=tracker,
        store=_open_store(cluster, version, next_group_id, kept, sampling),
        saver=CheckpointSaver(cluster.learners, folder),
        sampling=sampling,
        failures=FailureBudget(config.rollout.max_failed_ratio),
        watchdog=_watchdog(cluster, folder, tracker),
    )


def _open_store(
    cluster: Cluster, version: int, next_group_id: int, kept: KeptGroups, sampling: DynamicSampling
) -> Store:
    train = cluster.config.train
    return TrajectoryStore(
        groups_per_step=train.groups_per_step,
        max_staleness=train.max_staleness,
        max_in_flight=train.max_groups_in_flight,
        version=version,
        num_groups=(train.num_steps - version) * train.groups_per_step,
        next_group_id=next_group_id,
        straggler_window=straggler_window(train),
        waiting=cluster.put_groups(kept.waiting),
        done_ahead=kept.done_ahead,
        refuses=sampling.refuses,
    )


def straggler_window(train: TrainSection) -> int:
    """Return how many groups may be trained ahead of an older group that is still being generated: those of a step, or
    with partial rollouts as many as staleness allows. Synchronous runs are in order anyway."""
    return (train.max_staleness if train.partial_rollouts else 1) * train.groups_per_step


async def restore(
    learners: LearnerGroup, folder: RunFolder, *, note: Callable[[str], None]
) -> tuple[int, int, KeptGroups]:
    """Load the last complete checkpoint, or an earlier one if the weights are not finite. Return its version, next
    group id and kept groups; (0, 0, no groups) without one. RunFolderError: none can be used."""
    while (checkpoint := await asyncio.to_thread(folder.checkpoints.verified)) is not None:
        try:
            version = await learners.load_checkpoint(checkpoint.path / "learner")
        except CheckpointDamagedError as error:
            folder.checkpoints.refuse(checkpoint.path, str(error))
            continue
        if version != checkpoint.version:
            raise CheckpointError(
                f"{checkpoint.path} holds the weights of step {version}, which is not the step in its name: delete "
                "this checkpoint, or the whole run."
            )
        kept = await asyncio.to_thread(KeptGroups.read, checkpoint.path)
        folder.truncate_after(version)
        note(f"resumed from step {version} ({checkpoint.path})")
        return version, checkpoint.next_group_id, kept
    if num_steps := folder.truncate_after(-1):
        note(f"there is no checkpoint yet: the run starts over, and its {num_steps} recorded steps are deleted")
    return 0, 0, KeptGroups()


STALL_REPORT_S = 600.0  # without progress; the log then names what each process waits for


def _watchdog(cluster: Cluster, folder: RunFolder, tracker: RunTracker) -> Watchdog:
    async def dump() -> str:
        file = folder.path / "stacks.txt"
        text = f"{stacks_of_this_process()}\n{await cluster.dump_stacks()}"
        await asyncio.to_thread(file.write_text, text)
        return str(file)

    recovery = cluster.config.recovery
    return Watchdog(
        report_after_s=STALL_REPORT_S,
        stop_after_s=recovery.stall_stop_s,
        report=tracker.note,
        dump_stacks=dump,
    )


@asynccontextmanager
async def profiling_server(run: Training, step: int) -> AsyncIterator[None]:
    # A profile that fails is only noted.
    run.profiles.clear()
    if step not in run.cluster.config.train.profile_steps:
        yield
        return
    server = run.cluster.servers[0]
    with _noting_failure(run, step):
        await server.begin_profile()
    yield
    with _noting_failure(run, step):
        run.profiles.append(await server.end_profile())


async def write_profiles(run: Training, step: int) -> None:
    if step not in run.cluster.config.train.profile_steps:
        return
    with _noting_failure(run, step):
        if (of_learner := await run.cluster.learners.profile(step)) is not None:
            run.profiles.append(of_learner)
        with run.folder.explain_full_disk(run.folder.path / PROFILES):
            await asyncio.to_thread(write_profile, run.folder.path, step, run.profiles)
        covered = ", ".join(f"{profile.process} ({profile.covers})" for profile in run.profiles)
        run.tracker.note(f"traces of step {step} for Perfetto: {covered} in {run.folder.uri}/{PROFILES}")
    run.profiles.clear()


@contextmanager
def _noting_failure(run: Training, step: int) -> Iterator[None]:
    try:
        yield
    except (RayappError, ValueError) as error:
        if isinstance(error, LearnersLostError | StorageFullError):
            raise
        run.tracker.note(f"step {step} has no complete profile: {error}")
