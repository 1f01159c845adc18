"""Keeps the store filled: groups are started as it admits them.

    feed --> TrajectoryStore.reserve --> rollout-worker-i --> (summary, group_ref) --> TrajectoryStore

One task of the driver's, beside its steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from rayapp.core.errors import RayappError, one_error
from rayapp.core.logs import about
from rayapp.driver.lost_groups import generate
from rayapp.driver.run import Run
from rayapp.rollout.order import Cohort, GroupRequest, max_groups_at_once


@asynccontextmanager
async def feeding(run: Run) -> AsyncIterator[None]:
    """Keep the store filled while the block runs; a failure in either ends both.

    Raises:
        RayappError: the first failure, not a group of them.
    """
    with one_error():
        async with asyncio.TaskGroup() as tasks:
            feeder = tasks.create_task(feed(run), name="feed")
            yield
            feeder.cancel()


async def feed(run: Run) -> None:
    """Start groups as the store admits them. Consumes: slots. Produces: finished groups."""
    at_once = max_groups_at_once(run.cluster.config)
    # Nobody else takes seats, so groups that start together can wait until all of theirs are free.
    seats = asyncio.Semaphore(at_once)
    async with asyncio.TaskGroup() as tasks:
        while True:
            ids, version = await run.store.reserve()
            # Only a synchronous run starts groups together; what trickles in must not wait for company.
            size = min(at_once, len(ids)) if run.cluster.is_synchronous else 1
            for first in range(0, len(ids), size):
                together = ids[first : first + size]
                for _ in together:
                    await seats.acquire()
                for started in _start(run, together, version, tasks):
                    started.add_done_callback(lambda _: seats.release())


def _start(run: Run, together: Sequence[int], version: int, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
    started = []
    for request in _requests(run, together, version):
        with about(step=version + 1, group=request.group_id):
            started.append(tasks.create_task(_generate(run, request), name=f"group={request.group_id}"))
    return started


def _requests(run: Run, together: Sequence[int], version: int) -> Iterator[GroupRequest]:
    for place, group_id in enumerate(together):
        cohort = Cohort(place=place, size=len(together)) if len(together) > 1 else None
        request = GroupRequest(group_id=group_id, policy_version=version, cohort=cohort)
        yield request if run.curriculum is None else run.curriculum.drawn(request)


async def _generate(run: Run, request: GroupRequest) -> None:
    """One group, from its start into the store."""
    group_id = request.group_id

    def reissue(error: RayappError) -> int:
        version = run.store.reissue(group_id, type(error).__name__)
        run.tracker.note(f"group {group_id} is issued again: {error}")
        return version

    summary, ref = await generate(
        run.cluster,
        request,
        lambda worker, placed: worker.run_group(placed),
        what=f"group {group_id}",
        watchdog=run.watchdog,
        reissue=reissue,
    )
    if run.curriculum is not None:
        run.curriculum.record(request.place if request.source is None else request.source, summary)
    await run.store.finish(summary, ref)
