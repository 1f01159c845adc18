"""New groups go to the server with the fewest, stay there, and avoid a server that is being replaced. Requests that a
group makes at the same moment become one call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.routing import GroupCalls, Router
from rayapp.core.aio import as_they_end
from rayapp.core.errors import DeadlineError, EngineDeadError, EngineError, StaleVersionError
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.rollout.order import Cohort, GroupRequest, neighbours
from support import make


def alone(group_id: int) -> GroupRequest:
    return GroupRequest(group_id=group_id, policy_version=0)


def test_a_new_group_goes_to_the_server_with_the_fewest() -> None:
    router = Router(3)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(router.placed(alone(i))) for i in range(3))
        assert [first.server, second.server, third.server] == [0, 1, 2]
        with router.placed(alone(3)) as fourth:
            assert fourth.server == 0
            with router.placed(alone(4)) as fifth:
                assert fifth.server == 1
        # The fourth has ended, so server 0 has one group again, as all have.
        with router.placed(alone(5)) as sixth:
            assert sixth.server == 0
        with pytest.raises(ZeroDivisionError), router.placed(alone(6)):
            _ = 1 / 0
        assert router.metrics()["routing/groups_max"] == 1.0, "one that failed no longer counts"


def test_a_server_that_is_being_replaced_gets_nothing_while_another_is_up() -> None:
    down = {0}
    router = Router(2, is_up=lambda server: server not in down)
    with router.placed(alone(0)) as first, router.placed(alone(1)) as second:
        assert [first.server, second.server] == [1, 1]
    down.add(1)
    with router.placed(alone(2)) as third:  # no server is up: the group waits for the one that comes back
        assert third.server == 0


def test_a_cohort_is_dealt_out_by_place_although_its_ids_have_gaps() -> None:
    # Ids 4, 6, 8 all have remainder 0: by id they would share one server.
    router = Router(2)
    requests = [
        GroupRequest(group_id=group_id, policy_version=0, cohort=Cohort(place=place, size=3))
        for place, group_id in enumerate((4, 6, 8))
    ]
    with ExitStack() as stack:
        assert [stack.enter_context(router.placed(r)).server for r in requests] == [0, 1, 0]
    assert [neighbours(r.cohort, 2) for r in requests] == [2, 1, 2]


@given(
    num_servers=st.integers(1, 5),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60),
)
def test_loads_never_differ_by_more_than_what_has_ended(num_servers: int, events: list[tuple[bool, int]]) -> None:
    # Without endings, least-loaded keeps all loads within one of each other; each ending can widen that by one.
    router, open_groups, num_ended = Router(num_servers), [], 0
    for starts, which in events:
        if starts or not open_groups:
            stack = ExitStack()
            stack.enter_context(router.placed(alone(which)))
            open_groups.append(stack)
        else:
            open_groups.pop(which % len(open_groups)).close()
            num_ended += 1
    metrics = router.metrics()
    assert metrics["routing/groups_max"] - metrics["routing/groups_min"] <= 1 + num_ended
    for stack in open_groups:
        stack.close()
    assert router.metrics()["routing/groups_max"] == 0.0


class Server:
    """Stands for the handle of a server; answers with the last number of the request's id."""

    name = "vllm-server-0"
    request_timeout_s = 5.0

    def __init__(self, *, dies: bool = False, forgets: int | None = None) -> None:
        self.calls: list[list[RequestId]] = []
        self.cohort_sizes: list[int] = []
        self._dies = dies
        self._forgets = forgets

    async def generate_many(self, requests: Sequence[Any]) -> AsyncIterator[list[tuple[int, Completion | Exception]]]:
        self.calls.append([request[0] for request in requests])
        self.cohort_sizes += [request[4] for request in requests]
        # One after another: a request ends when the previous result has been taken.
        turns = [asyncio.Event() for _ in requests]
        turns[0].set()
        async for batch in as_they_end([self._one(*each) for each in zip(requests, turns, strict=True)]):
            yield [pair for pair in batch if pair[0] != self._forgets]
            if self._dies:
                raise EngineDeadError("its process is gone")
            for place, _ in batch:
                turns[min(place + 1, len(turns) - 1)].set()

    async def _one(self, request: Any, turn: asyncio.Event) -> Completion:
        request_id, prompt_ids, _, version, _ = request
        assert prompt_ids.dtype == np.int32
        index = request_id.trajectory
        await turn.wait()
        if index == 2:
            raise StaleVersionError(f"{request_id} needs {version}")
        return make.completion(index, policy_version=version)


async def ask(server: Server, *indices: int) -> list[Any]:
    calls = GroupCalls(server, min_policy_version=4, cohort_size=8)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=1)
    asked = [calls.generate(RequestId("group", 7, i), [1, 2], sampling) for i in indices]
    return list(await asyncio.gather(*asked, return_exceptions=True))


async def test_one_call_for_all_and_each_gets_its_own_answer() -> None:
    server = Server()

    found = await ask(server, 0, 1, 2, 3)

    assert server.calls == [[RequestId("group", 7, i) for i in range(4)]]
    assert [c.token_ids.tolist() for c in found if isinstance(c, Completion)] == [[0], [1], [3]]
    assert isinstance(found[2], StaleVersionError)
    assert found[0].policy_version == 4


async def test_a_server_that_dies_has_answered_what_it_answered() -> None:
    found = await ask(Server(dies=True), 0, 1, 3)

    assert isinstance(found[0], Completion)
    assert [type(error) for error in found[1:]] == [EngineDeadError, EngineDeadError]


async def test_an_answer_that_never_comes_is_an_error_and_not_a_wait() -> None:
    found = await ask(Server(forgets=1), 0, 1)

    assert isinstance(found[0], Completion)
    assert isinstance(found[1], EngineError)
    assert "gave no answer to group=7/trajectory=1" in str(found[1])


async def test_each_request_has_its_deadline() -> None:
    class Silent(Server):
        request_timeout_s = 0.05

        async def _one(self, request: Any, turn: asyncio.Event) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    (found,) = await ask(Silent(), 0)
    assert isinstance(found, DeadlineError)
    assert "vllm-server-0 did not answer request group=7/trajectory=0 within 0.05 s" in str(found)


async def test_later_turns_are_calls_of_their_own_and_wait_for_no_cohort() -> None:
    server = Server()
    calls = GroupCalls(server, min_policy_version=0, cohort_size=8)  # type: ignore[arg-type]
    for turn in (0, 1):
        await calls.generate(RequestId("group", 0, 0, turn=turn), [1], SamplingParams(max_tokens=1))
    assert server.calls == [[RequestId("group", 0, 0, turn=turn)] for turn in (0, 1)]
    assert server.cohort_sizes == [8, 1]


@pytest.mark.parametrize("gives_up", [0, 3])
async def test_who_gives_up_disturbs_nobody(gives_up: int) -> None:
    server = Server()
    calls = GroupCalls(server, min_policy_version=0, cohort_size=8)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=1)
    tasks = {i: asyncio.create_task(calls.generate(RequestId("group", 0, i), [1], sampling)) for i in (0, 1, 3)}
    await asyncio.sleep(0)
    tasks.pop(gives_up).cancel()
    found = await asyncio.gather(*tasks.values())
    assert all(isinstance(completion, Completion) for completion in found)
