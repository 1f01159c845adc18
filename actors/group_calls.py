"""Requests of one group that start together, as one call to their server: a call through Ray costs as much processor
time as everything else that a trajectory needs here.

Used by rollout workers. Completions come back as they end, those of one moment together. Later turns, which start one
by one, are calls of one request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actors.handles import VllmServerHandle
from rayapp.core.errors import DeadlineError, EngineError, RayappError
from rayapp.core.types import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class _Call:
    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    cohort_size: int
    answer: asyncio.Future[Completion]


class GroupCalls:
    """See the module.

    Args:
        min_policy_version: of every request.
    """

    def __init__(self, server: VllmServerHandle, *, min_policy_version: int) -> None:
        self._server = server
        self._version = min_policy_version
        self._waiting: list[_Call] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, *, cohort_size: int
    ) -> Completion:
        """As `VllmServerHandle.generate`."""
        loop = asyncio.get_running_loop()
        call = _Call(request_id, prompt_ids, sampling, cohort_size, loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            # After everything that is ready to run now: the group's other trajectories, which ask in the same moment.
            loop.call_soon(self._send)
        try:
            async with asyncio.timeout(self._server.request_timeout_s):
                return await call.answer
        except TimeoutError:
            raise DeadlineError(
                f"{self._server.name}.generate did not answer {request_id} within {self._server.request_timeout_s:g} s"
            ) from None

    def _send(self) -> None:
        calls, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._listen(calls), name=f"calls {self._server.name}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _listen(self, calls: list[_Call]) -> None:
        requests = [
            (c.request_id, np.asarray(c.prompt_ids, np.int32), c.sampling, self._version, c.cohort_size) for c in calls
        ]
        try:
            async for batch in self._server.generate_many(requests):
                for position, outcome in batch:
                    _settle(calls[position], outcome)
        except RayappError as error:
            for call in calls:
                _settle(call, error)
        for call in calls:
            _settle(call, EngineError(f"{self._server.name} gave no answer to {call.request_id}"))


def _settle(call: _Call, outcome: Completion | Exception) -> None:
    """Once; whoever asked may have given up."""
    if call.answer.done():
        return
    if isinstance(outcome, Exception):
        call.answer.set_exception(outcome)
    else:
        call.answer.set_result(outcome)
