"""Keeps the store filled: starts groups as the store admits them, and again if they are lost with a process.

A group that fails although every process works (its prompt can't be rendered, a plug-in raised) is dropped; a
configuration error that affects every group ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

from rayapp.core.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    GroupFailedError,
    ObjectsLostError,
    ProcessDiedError,
    RayappError,
    RestartsUsedUpError,
    SandboxConfigError,
    StaleVersionError,
    WeightSyncError,
    one_error,
)
from rayapp.core.logs import about
from rayapp.driver.cluster import Cluster, RolloutWorkerHandle
from rayapp.driver.group_rules import GROUP_FAILED
from rayapp.driver.run import Training
from rayapp.driver.watchdog import Watchdog
from rayapp.rollout.order import Cohort, GroupRequest, max_groups_at_once

log = logging.getLogger(__name__)
T = TypeVar("T")
MAX_ISSUES = 10  # of one group: if processes are lost with it again and again, it may be the cause
# Errors of a group whose worker, server, sandbox pool or node is gone, hangs, or is not ready after a restart.
LOST_GROUP = (
    ProcessDiedError,
    EngineDeadError,
    StaleVersionError,
    WeightSyncError,
    DeadlineError,
    ObjectsLostError,
)


async def generate(
    cluster: Cluster,
    request: GroupRequest,
    call: Callable[[RolloutWorkerHandle, GroupRequest], Awaitable[T]],
    *,
    what: str,
    watchdog: Watchdog | None,
    reissue: Callable[[RayappError], int],
) -> T:
    """Return the rollout worker's result for a group; issue it again when a lost process has been replaced.

    `reissue` gets the reason of a loss, and returns the policy version that must sample the group now.
    RestartsUsedUpError: lost `MAX_ISSUES` times. GroupFailedError: it fails although its processes work. ConfigError,
    SandboxConfigError: every group would fail.
    """
    for _ in range(MAX_ISSUES):
        try:
            with cluster.images.placed(request) as index, cluster.router.placed(request) as placed:
                worker = cluster.rollout_workers[index]
                with watchdog.waiting(what, worker.name) if watchdog else nullcontext():
                    return await call(worker, placed)
        except LOST_GROUP as error:
            # Issue the group without its cohort: the cohort's other groups may be done, or in flight on another server.
            request = replace(request, policy_version=reissue(error), cohort=None)
            await cluster.supervisor.settled()
            cluster.check_weights()
        except (ConfigError, SandboxConfigError):
            raise
        except RayappError as error:
            raise GroupFailedError(f"{what} failed: {error}") from error
    raise RestartsUsedUpError(
        f"{what} was lost {MAX_ISSUES} times; the log above has the reason of each loss. Correct the cause, then start "
        "the same command again."
    )


@asynccontextmanager
async def feeding(run: Training) -> AsyncIterator[None]:
    """Keep the store filled; a failure in the block or in feeding ends both."""
    with one_error():
        async with asyncio.TaskGroup() as tasks:
            feeder = tasks.create_task(feed(run), name="feed")
            yield
            feeder.cancel()


async def feed(run: Training) -> None:
    """Start groups as the store admits them. Each runs in a task of its own, which puts it into the store."""
    at_once = max_groups_at_once(run.cluster.config.rollout)
    # Only this task acquires slots. So it can hold some slots and wait for the rest, until all groups that start
    # together have one.
    slots = asyncio.Semaphore(at_once)
    async with asyncio.TaskGroup() as tasks:
        while True:
            ids, version = await run.store.reserve()
            tasks.create_task(_prefetch(run, ids), name="prefetch images")
            # Only a synchronous run starts groups together; in an asynchronous run a group must not wait for a cohort.
            size = min(at_once, len(ids)) if run.cluster.is_synchronous else 1
            for first in range(0, len(ids), size):
                together = ids[first : first + size]
                for _ in together:
                    await slots.acquire()
                for started in _start(run, together, version, tasks):
                    started.add_done_callback(lambda _: slots.release())


async def _prefetch(run: Training, ids: Sequence[int]) -> None:
    """Let the rollout workers pull the images of these groups, and of as many as a step has after them."""
    last = run.cluster.config.train.num_steps * run.cluster.config.train.groups_per_step
    coming = range(ids[0], min(ids[-1] + 1 + run.cluster.config.train.groups_per_step, last))
    for index, images in run.cluster.images.ahead(coming).items():
        try:
            await run.cluster.rollout_workers[index].prefetch(images)
        except RayappError as error:  # a worker that is being replaced pulls its images when it needs them
            log.info("images of the next groups were not pulled in advance: %s", error)


def _start(run: Training, together: Sequence[int], version: int, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
    started = []
    for request in _requests(run, together, version):
        with about(step=version + 1, group=request.group_id):
            started.append(tasks.create_task(_generate(run, request), name=f"group={request.group_id}"))
    return started


def _requests(run: Training, together: Sequence[int], version: int) -> Iterator[GroupRequest]:
    for place, group_id in enumerate(together):
        cohort = Cohort(place=place, size=len(together)) if len(together) > 1 else None
        yield GroupRequest(group_id=group_id, policy_version=version, cohort=cohort)


async def _generate(run: Training, request: GroupRequest) -> None:
    group_id = request.group_id

    def reissue(error: RayappError) -> int:
        version = run.store.reissue(group_id, type(error).__name__)
        run.tracker.note(f"group {group_id} is issued again: {error}")
        return version

    try:
        summary, ref = await generate(
            run.cluster,
            request,
            lambda worker, placed: worker.run_group(placed),
            what=f"group {group_id}",
            watchdog=run.watchdog,
            reissue=reissue,
        )
    except GroupFailedError as error:
        run.tracker.note(f"{error} Another group takes its place in the step.")
        run.failures.lost_group(run.cluster.config, str(error))
        await run.store.drop(group_id, GROUP_FAILED)
        return
    await run.store.finish(summary, ref)
    run.tracker.progress(run.store.progress)
