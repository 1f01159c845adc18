"""Lost or hanging processes are replaced once, within a limit, and no caller waits forever."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rayapp.config.sections import RecoverySection
from rayapp.core.errors import (
    DeadlineError,
    EngineDeadError,
    ProcessDiedError,
    ProcessUnavailableError,
    RayappError,
    RestartsUsedUpError,
    WeightSyncError,
)
from rayapp.driver.cluster import Cluster
from rayapp.driver.supervision import Supervisor

RECOVERY = RecoverySection(max_restarts=2, ping_timeout_s=30.0)


def supervising(*members: Any, recovery: RecoverySection = RECOVERY, **options: Any) -> Supervisor:
    return Supervisor(members, recovery, **{"revive_timeout_s": 30.0, "ping_every_s": 0.001, **options})


class Process:
    """A member controlled by the test. `state` is up, dead (Ray starts it at once), hanging, or broken."""

    def __init__(
        self, name: str = "vllm-server-0", *, revives: bool = True, is_starved: bool = False, needs: int = 0
    ) -> None:
        self.name = name
        self._is_starved = is_starved
        self._needs_unmet = needs
        self.state = "up"
        self.start = 1
        self.num_unanswered = 0
        self.unanswered_with: type[DeadlineError | ProcessUnavailableError] = ProcessUnavailableError
        self.log: list[str] = []
        self._revives = revives

    def die(self, *, is_starved: bool = False) -> None:
        """Die as under Ray: two calls find no process, the third finds the next start. Starved: they get no answer."""
        self.start += 1
        self.num_unanswered = 2
        self.state = "new"
        self.unanswered_with = DeadlineError if is_starved else ProcessUnavailableError

    async def incarnation(self, timeout_s: float) -> str:
        if self.state == "hanging":
            raise DeadlineError(f"{self.name}.ping did not answer")
        if self.num_unanswered:
            self.num_unanswered -= 1
            raise self.unanswered_with(f"{self.name}.incarnation: no answer")
        return f"start {self.start}"

    async def ping(self, timeout_s: float) -> str:
        incarnation = await self.incarnation(timeout_s)
        if self.state in ("new", "broken"):
            raise EngineDeadError(f"{self.name} can't generate")
        return incarnation

    async def kill(self) -> None:
        self.log.append("killed")
        self.die(is_starved=self._is_starved)

    async def revive(self) -> None:
        if not self._revives:
            self.die()
            raise ProcessDiedError("it died again")
        if self._needs_unmet:
            self._needs_unmet -= 1
            raise ProcessUnavailableError("another process that it needs is gone")
        self.log.append(f"revived {self.start}")
        self.state = "up"


async def eventually(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("changes", "log"),
    [
        ({"start": 2, "num_unanswered": 2, "state": "new"}, ["revived 2"]),
        ({"state": "hanging"}, ["killed", "revived 2"]),
        ({"state": "broken"}, ["killed", "revived 2"]),
        # It answers, but as another incarnation.
        ({"start": 2}, ["revived 2"]),
    ],
    ids=["dead", "hanging", "without its engine", "started again unnoticed"],
)
async def test_a_lost_process_is_made_ready_again_once_and_the_others_are_left_alone(
    changes: dict[str, Any], log: list[str]
) -> None:
    process, healthy = Process(), Process("rollout-worker-0")
    supervisor = supervising(process, healthy)
    async with supervisor.watching():
        vars(process).update(changes)
        await eventually(lambda: len(process.log) == len(log))
        await supervisor.settled()
    assert (process.log, healthy.log) == (log, [])
    assert supervisor.metrics()["recovery/restarts"] == 1.0


async def test_one_that_answers_late_while_it_starts_is_not_taken_for_hung() -> None:
    process = Process(is_starved=True)
    supervisor = supervising(process)
    async with supervisor.watching():
        process.state = "hanging"
        await eventually(lambda: len(process.log) == 2)
        await supervisor.settled()
    assert process.log == ["killed", "revived 2"]
    assert dict(supervisor.restarts) == {"vllm-server-0": 1}


async def test_one_that_lives_but_could_not_be_made_ready_is_started_again_and_not_waited_for() -> None:
    # It does not die when the process that it needs is gone: only the supervisor restarts it.
    process = Process("rollout-worker-0", needs=1)
    async with supervising(process).watching():
        process.die()
        await eventually(lambda: "revived 3" in process.log)
    assert process.log == ["killed", "revived 3"]


async def test_many_callers_that_see_one_death_cause_one_restart_and_all_wait_for_it() -> None:
    process = Process()
    supervisor = supervising(process)
    async with supervisor.watching():
        process.die()
        await asyncio.gather(*(supervisor.settled() for _ in range(50)))
        assert process.state == "up"
    assert process.log == ["revived 2"]


class SlowProcess(Process):
    """A process that is made ready only when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_revive = asyncio.Event()

    async def revive(self) -> None:
        await self.may_revive.wait()
        await super().revive()


async def test_a_replacement_goes_on_when_whoever_waits_for_it_is_stopped_and_counts_once() -> None:
    # The learners are lost with the same node: groups that wait for the server are dropped, and the run continues.
    process = SlowProcess()
    supervisor = supervising(process, ping_every_s=60.0, revive_timeout_s=60.0)
    async with supervisor.watching():
        process.die()
        waiting = asyncio.create_task(supervisor.settled())
        await eventually(lambda: not supervisor.is_up(process.name))
        waiting.cancel()
        await asyncio.wait([waiting])
        process.may_revive.set()
        await supervisor.settled()
        assert supervisor.is_up(process.name)
    assert process.log == ["revived 2"]
    assert dict(supervisor.restarts) == {"vllm-server-0": 1}


class Weights:
    """A sync that finds a server while it starts: it answers, but has no engine."""

    def __init__(self, process: Process, supervisor: Supervisor) -> None:
        self._process, self._supervisor = process, supervisor

    async def sync(self, version: int, **_: Any) -> tuple[dict[str, float], dict[str, RayappError]]:
        self._process.die()
        await eventually(lambda: not self._supervisor.is_up(self._process.name))
        return {}, {
            self._process.name: EngineDeadError(f"{self._process.name} can't generate: its engine is being started")
        }


async def test_a_server_that_dies_before_a_weight_sync_counts_one_restart_and_its_replacement_is_left_alone() -> None:
    process = Process()
    supervisor = supervising(process)
    parts: Any = {"learners": None, "servers": (process,), "supervisor": supervisor}
    async with supervisor.watching():
        cluster = SimpleNamespace(**parts, weights=Weights(process, supervisor))
        cluster._replace = partial(Cluster._replace, cast("Cluster", cluster))

        metrics = await Cluster.sync_weights(cast("Cluster", cluster), 3)

        assert metrics == {"weight_sync/servers_failed": 1.0}
        assert process.state == "up"
    assert process.log == ["revived 2"]
    assert dict(supervisor.restarts) == {"vllm-server-0": 1}


async def test_one_that_is_condemned_is_replaced_although_it_answers_and_only_once() -> None:
    process = Process()
    supervisor = supervising(process)
    async with supervisor.watching():
        first = supervisor.incarnation(process.name)
        await asyncio.gather(*(supervisor.condemn(process.name, first, "half of the weights") for _ in range(3)))
        assert supervisor.incarnation(process.name) == "start 2"
    assert process.log == ["killed", "revived 2"]


async def test_restarts_are_bounded_and_the_error_says_what_to_do() -> None:
    process = Process()
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervising(process).watching():
            for count in range(1, 3):
                process.die()
                await eventually(lambda count=count: len(process.log) == count)
            process.die()
            await asyncio.sleep(10)
    assert isinstance(caught.value.exceptions[0], RestartsUsedUpError)
    assert "vllm-server-0 was lost 3 times, and recovery.max_restarts is 2" in str(caught.value.exceptions[0])


async def test_one_that_never_comes_back_uses_its_restarts_up() -> None:
    process = Process(revives=False)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervising(process).watching():
            process.die()
            await asyncio.sleep(10)
    assert "it died again" in str(caught.value.exceptions[0])


async def test_a_server_is_not_started_before_there_is_room_and_the_wait_is_not_taken_for_a_slow_start() -> None:
    process, has_room, asked = Process(), asyncio.Event(), list[str]()

    async def may_start(name: str) -> None:
        asked.append(name)
        await has_room.wait()

    async with supervising(process, revive_timeout_s=2.0, may_start=may_start).watching():
        process.die()
        await eventually(lambda: asked == ["vllm-server-0"])
        late = asyncio.get_running_loop().time() + 2.0
        await eventually(lambda: asyncio.get_running_loop().time() > late)
        assert process.log == []
        has_room.set()
        await eventually(lambda: process.log == ["revived 2"])
    assert asked == ["vllm-server-0"]


async def test_servers_that_half_took_the_weights_are_all_started_at_once() -> None:
    servers = [Process(f"vllm-server-{index}") for index in range(3)]
    together = asyncio.Barrier(len(servers))

    async def revive(server: Process) -> None:
        await together.wait()
        server.state = "up"

    for server in servers:
        server.revive = partial(revive, server)  # type: ignore[method-assign]

    supervisor = supervising(*servers, ping_every_s=60.0, revive_timeout_s=60.0)
    async with supervisor.watching():
        cluster = cast(Cluster, SimpleNamespace(supervisor=supervisor))
        failed: dict[str, RayappError] = {server.name: WeightSyncError("it broke off") for server in servers}
        async with asyncio.timeout(60):  # if started one after the other, none would come up
            await Cluster._replace(cluster, failed)
    assert supervisor.restarts.total() == 3
