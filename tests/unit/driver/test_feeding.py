"""Groups start as the store admits them, and no more at once than the rollout workers hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rayapp.config.config import Config
from rayapp.core.summaries import summarize_group
from rayapp.core.types import Group, GroupSummary, Prompt
from rayapp.driver.feeding import feeding
from rayapp.driver.routing import Router
from rayapp.driver.run import Run
from rayapp.driver.store import TrajectoryStore
from rayapp.driver.watchdog import Watchdog
from rayapp.rollout.order import MAX_TRAJECTORIES_PER_WORKER, Cohort, GroupRequest
from rayapp.testing.learners import sampled

NUM_GROUPS = 5


def group_of(request: GroupRequest) -> Group:
    tokens = np.arange(4, dtype=np.int32)
    prompt = Prompt(task="t", text="", token_ids=tokens[:2])
    trajectory = sampled(tokens, 2, reward=0.0, policy_version=request.policy_version)
    return Group(group_id=request.group_id, prompt=prompt, trajectories=(trajectory,))


class Worker:
    """Ends a group a few turns of the loop after it began, and remembers how many it had at once."""

    name = "rollout-worker-0"

    def __init__(self) -> None:
        self.cohorts: list[Cohort | None] = []
        self.most = self._now = 0

    async def run_group(self, request: GroupRequest) -> tuple[GroupSummary, object]:
        self.cohorts.append(request.cohort)
        self._now += 1
        self.most = max(self.most, self._now)
        for _ in range(10):
            await asyncio.sleep(0)
        self._now -= 1
        return summarize_group(group_of(request), time_total_s=0.0), object()


async def no_stacks() -> str:
    return ""


def run_of(worker: Worker, config: Config, *, max_staleness: int) -> Run:
    cluster: Any = SimpleNamespace(
        config=config, is_synchronous=max_staleness == 0, rollout_worker=lambda group_id: worker, router=Router(1)
    )
    store: Any = TrajectoryStore(
        groups_per_step=NUM_GROUPS, max_staleness=max_staleness, version=0, num_groups=NUM_GROUPS
    )
    watchdog = Watchdog(report_after_s=60, stop_after_s=60, report=print, dump_stacks=no_stacks)
    parts = SimpleNamespace(cluster=cluster, store=store, watchdog=watchdog, curriculum=None)
    return cast("Run", parts)


@pytest.mark.parametrize(
    ("max_staleness", "cohorts"),
    [
        # Two groups are all that one worker holds: they start together, then two more, then the last, alone.
        (0, [Cohort(place=0, size=2), Cohort(place=1, size=2)] * 2 + [None]),
        (1, [None] * NUM_GROUPS),
    ],
)
async def test_groups_that_the_workers_cannot_hold_wait_in_the_driver(
    max_staleness: int, cohorts: list[Cohort | None]
) -> None:
    group_size = MAX_TRAJECTORIES_PER_WORKER // 2
    config = Config.model_validate({"model": {"path": "m"}, "tasks": ["t"], "rollout": {"group_size": group_size}})
    worker = Worker()
    run = run_of(worker, config, max_staleness=max_staleness)

    async with asyncio.timeout(60), feeding(run):
        groups = await run.store.take(NUM_GROUPS)

    assert [group.summary.group_id for group in groups] == list(range(NUM_GROUPS))
    assert worker.most == 2
    assert worker.cohorts == cohorts
