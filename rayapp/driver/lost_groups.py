"""One group from its start to its end, for training or evaluation: issued again when what it was on is lost.

feeding, evaluation --> generate --> Router.placed --> rollout-worker-i --> summary
                           ^                                  | lost with a process
                           '--- again, alone <-- Supervisor.settled
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TypeVar

from rayapp.core.errors import (
    DeadlineError,
    EngineDeadError,
    ObjectsLostError,
    ProcessDiedError,
    RayappError,
    RestartsUsedUpError,
    StaleVersionError,
    WeightSyncError,
)
from rayapp.driver.cluster import Cluster, RolloutWorkerHandle
from rayapp.driver.watchdog import Watchdog
from rayapp.rollout.order import GroupRequest

T = TypeVar("T")
MAX_ISSUES = 10
"""Times that one group is issued: a process may be lost a few times, but not the same group each time."""
LOST_GROUP = (
    ProcessDiedError,
    EngineDeadError,
    StaleVersionError,
    WeightSyncError,
    DeadlineError,
    ObjectsLostError,
)
"""A group's worker, server, sandbox pool or node is gone, hangs, or was started again and is not ready."""


async def generate(
    cluster: Cluster,
    request: GroupRequest,
    call: Callable[[RolloutWorkerHandle, GroupRequest], Awaitable[T]],
    *,
    what: str,
    watchdog: Watchdog | None,
    reissue: Callable[[RayappError], int],
) -> T:
    """The answer of the group's rollout worker. A group that is lost with a process waits until that is replaced.

    Args:
        call: asks the worker; the request has its server then.
        what: the group, for messages.
        watchdog: told of the wait, and of its end as progress; None where nobody watches.
        reissue: told why the group was lost; says which weights must sample it now.
    Raises:
        RestartsUsedUpError: it was lost `MAX_ISSUES` times.
    """
    for _ in range(MAX_ISSUES):
        worker = cluster.rollout_worker(request.group_id)
        try:
            with (
                watchdog.waiting(what, worker.name) if watchdog else nullcontext(),
                cluster.router.placed(request) as placed,
            ):
                return await call(worker, placed)
        except LOST_GROUP as error:
            # Alone: the others of its cohort may be done, or be on their way from another server.
            request = replace(request, policy_version=reissue(error), cohort=None)
            await cluster.supervisor.settled()
            cluster.check_weights()
    raise RestartsUsedUpError(f"{what} was lost {MAX_ISSUES} times; see the notes above for the reasons")
