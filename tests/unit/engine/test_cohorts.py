"""Requests of a cohort start together and in order; a lost one does not keep the others waiting forever."""

from __future__ import annotations

import asyncio

import pytest

from rayapp.core.errors import EngineDeadError
from rayapp.core.types import RequestId, SamplingParams
from rayapp.engine.admission import Cohorts, Request

LONG_S = 600.0


class Engine:
    """Starts requests once `may_start` is set, and returns each request's own id."""

    def __init__(self) -> None:
        self.started: list[list[RequestId]] = []
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def start(self, cohort: list[Request]) -> None:
        await self.may_start.wait()
        self.started.append([request.request_id for request in cohort if not request.queue.done()])
        for request in cohort:
            if not request.queue.done():
                request.queue.set_result(request.request_id)


def request(trajectory: int) -> Request:
    return Request(RequestId("group", 1, trajectory), [1], SamplingParams(max_tokens=1))


def ids(*trajectories: int) -> list[RequestId]:
    return [RequestId("group", 1, trajectory) for trajectory in trajectories]


async def test_a_cohort_starts_when_its_last_request_is_there_in_the_order_of_ids() -> None:
    engine = Engine()
    cohorts = Cohorts(engine.start, patience_s=LONG_S)

    found = await asyncio.gather(*(cohorts.admit(request(number), 3) for number in (10, 9, 2)))

    assert engine.started == [ids(2, 9, 10)]
    assert found == ids(10, 9, 2)


async def test_those_whose_company_does_not_come_start_together_without_it() -> None:
    engine = Engine()
    cohorts = Cohorts(engine.start, patience_s=0.05)

    found = await asyncio.gather(*(cohorts.admit(request(number), 3) for number in (0, 1)))

    assert found == ids(0, 1)
    assert engine.started == [ids(0, 1)]


async def test_a_cohort_that_is_being_started_is_not_started_again_however_long_that_takes() -> None:
    engine = Engine()
    engine.may_start.clear()
    cohorts = Cohorts(engine.start, patience_s=0.01)
    both = asyncio.gather(*(cohorts.admit(request(number), 2) for number in (0, 1)))

    await asyncio.sleep(0.05)  # five times their patience
    engine.may_start.set()

    assert await both == ids(0, 1)
    assert engine.started == [ids(0, 1)]


async def test_a_start_that_fails_is_told_to_all_of_the_cohort() -> None:
    async def fail(cohort: list[Request]) -> None:
        raise EngineDeadError("the engine is gone")

    cohorts = Cohorts(fail, patience_s=LONG_S)

    found = await asyncio.gather(*(cohorts.admit(request(number), 2) for number in (0, 1)), return_exceptions=True)

    assert [type(outcome) for outcome in found] == [EngineDeadError, EngineDeadError]


@pytest.mark.parametrize("is_starting", [False, True])
async def test_one_that_is_cancelled_takes_nobody_along(is_starting: bool) -> None:
    engine = Engine()
    engine.may_start.clear()
    cohorts = Cohorts(engine.start, patience_s=LONG_S)
    first = asyncio.ensure_future(cohorts.admit(request(0), 2))
    await asyncio.sleep(0)
    if is_starting:
        second = asyncio.ensure_future(cohorts.admit(request(1), 2))
        await asyncio.sleep(0)

    first.cancel()
    await asyncio.wait([first])
    if not is_starting:
        # Its place is free again: the next two are a cohort.
        second = asyncio.ensure_future(asyncio.wait_for(cohorts.admit(request(1), 2), 10.0))
        await asyncio.sleep(0)
        third = asyncio.ensure_future(cohorts.admit(request(2), 2))
        await asyncio.sleep(0)
    engine.may_start.set()

    assert await second == RequestId("group", 1, 1)
    assert engine.started == [ids(1) if is_starting else ids(1, 2)]
    if not is_starting:
        assert await third == RequestId("group", 1, 2)
