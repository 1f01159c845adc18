"""Groups start as the store admits them, and no more at once than the rollout workers hold."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.routing import Router
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, InputError, RayappError, TrainingAbortedError
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, GroupSummary
from rayapp.driver.feeding import feeding
from rayapp.driver.group_rules import FailureBudget
from rayapp.driver.run import Training
from rayapp.driver.store import TrajectoryStore
from rayapp.rollout.container_images import ImagePlacement
from rayapp.rollout.order import MAX_TRAJECTORIES_PER_WORKER, Cohort, GroupRequest
from support import make

NUM_GROUPS = 5


def group_of(request: GroupRequest) -> Group:
    return make.group(make.trajectory(range(4), 2, policy_version=request.policy_version), group_id=request.group_id)


class Worker:
    """Ends a group a few turns of the loop after its start, and records how many it had at once."""

    name = "rollout-worker-0"

    def __init__(self) -> None:
        self.cohorts: list[Cohort | None] = []
        self.fails_with: dict[int, Exception] = {}
        self.prefetched: list[str] = []
        self.most = self._now = 0

    async def prefetch(self, images: list[str]) -> None:
        self.prefetched += images

    async def run_group(self, request: GroupRequest) -> tuple[GroupSummary, object]:
        if request.group_id in self.fails_with:
            raise self.fails_with[request.group_id]
        self.cohorts.append(request.cohort)
        self._now += 1
        self.most = max(self.most, self._now)
        for _ in range(10):
            await asyncio.sleep(0)
        self._now -= 1
        return summarize_group(group_of(request), time_total_s=0.0), object()


def run_of(worker: Worker, config: Config, *, max_staleness: int) -> Training:
    cluster: Any = SimpleNamespace(
        config=config,
        is_synchronous=max_staleness == 0,
        rollout_workers=[worker],
        router=Router(1),
        images=ImagePlacement.of(config),
    )
    store: Any = TrajectoryStore(
        groups_per_step=NUM_GROUPS, max_staleness=max_staleness, version=0, num_groups=NUM_GROUPS
    )
    parts = SimpleNamespace(
        cluster=cluster, store=store, watchdog=make.watchdog(), failures=FailureBudget(0.3),
        tracker=SimpleNamespace(note=print, progress=print),
    )  # fmt: skip
    return cast("Training", parts)


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


async def test_images_of_a_step_and_of_the_one_after_it_are_pulled_before_their_groups_start() -> None:
    config = Config.model_validate({"train": {"groups_per_step": NUM_GROUPS, "num_steps": 9}})
    worker = Worker()
    run = run_of(worker, config, max_staleness=0)
    prompts = tuple((f"image:{number}",) for number in range(40))
    run.cluster.images = ImagePlacement.of(config, [prompts])

    async with asyncio.timeout(60), feeding(run):
        await run.store.take(NUM_GROUPS)

    coming = [GroupRequest(group_id=number, policy_version=0) for number in range(2 * NUM_GROUPS)]
    assert worker.prefetched == [image for request in coming for image in run.cluster.images.images(request)]


CONFIG = Config.model_validate({"model": {"path": "m"}, "tasks": ["t"], "rollout": {"group_size": 4}})


@pytest.mark.parametrize("error", [RayappError("run_group failed: ValueError: bad row"), InputError("no such image")])
@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_group_that_fails_as_a_whole_costs_itself_and_the_next_prompt_takes_its_place(
    error: RayappError, max_staleness: int
) -> None:
    worker = Worker()
    worker.fails_with = {2: error}
    run = run_of(worker, CONFIG, max_staleness=max_staleness)

    async with asyncio.timeout(60), feeding(run):
        groups = await run.store.take(NUM_GROUPS)

    assert {group.summary.group_id for group in groups} == {0, 1, 3, 4, 5}
    assert run.store.dropped_for == {"group_failed": 1}
    run.failures.record(group.summary for group in groups)
    assert run.failures.ratio > 0.0


async def test_groups_that_all_fail_end_the_run_and_a_configuration_without_a_way_does_so_at_once() -> None:
    worker = Worker()
    worker.fails_with = {group_id: RayappError("no luck") for group_id in range(100)}
    with pytest.raises(TrainingAbortedError, match=r"11 groups failed since the last step.*no luck"):
        async with asyncio.timeout(60), feeding(run_of(worker, CONFIG, max_staleness=0)) as _:
            await asyncio.sleep(60)
    worker.fails_with = {0: ConfigError("no isolation")}
    with pytest.raises(ConfigError, match="no isolation"):
        async with asyncio.timeout(60), feeding(run_of(worker, CONFIG, max_staleness=0)):
            await asyncio.sleep(60)
