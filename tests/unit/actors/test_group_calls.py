"""Requests that a group makes at the same moment become one call; every trajectory gets its own result or error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from actors.routing import GroupCalls
from rayapp.core.aio import as_they_end
from rayapp.core.errors import DeadlineError, EngineDeadError, EngineError, StaleVersionError
from rayapp.core.types import Completion, RequestId, SamplingParams
from support import make


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
