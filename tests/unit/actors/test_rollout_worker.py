"""A rollout worker that is told to end. No Ray is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.rollout_worker import RolloutWorker
from rayapp.config.config import Config
from rayapp.rollout.order import GroupRequest


class Endless:
    """A run's sources, each group of which waits forever."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), list[str]()

    config, agent, judging = Config(), None, None

    def of(self, request: GroupRequest) -> tuple[Any, GroupRequest]:
        return self, request

    async def problem(self, request: GroupRequest, *, seed: int) -> Any:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)  # the time that returning a sandbox takes
            self.ended.append("group")

    async def close(self) -> None:
        self.ended.append("tools")


async def test_a_worker_that_ends_cancels_its_groups_before_it_takes_away_what_they_use() -> None:
    worker: Any = RolloutWorker(Config(), 0, (), pool=None)  # type: ignore[arg-type]
    worker._sources = sources = Endless()
    request = GroupRequest(group_id=0, policy_version=0, server=0)
    running = asyncio.create_task(worker.run_group(request))
    await sources.begun.wait()

    await worker.close()

    assert sources.ended == ["group", "tools"]
    with pytest.raises(asyncio.CancelledError):
        await running
