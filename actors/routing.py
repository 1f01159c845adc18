"""Sends a group's requests to a server: `Router` in the driver chooses the server, `GroupCalls` in a worker calls it.

A group stays on its server, whose prefix cache holds its prompt and earlier turns. A group that starts alone goes to
the server with the fewest; groups of a cohort by their index, alike in every synchronous run. Requests that start
together are one call: a call through Ray costs as much processor time as all other work for a trajectory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import ray

from actors.handles import GenerateRequest, ObjectRef, VllmServerHandle
from rayapp.core.errors import DeadlineError, EngineError, RayappError
from rayapp.core.protocols import OnTokens
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.rollout.order import GroupRequest, server_in_cohort


class Router:
    """Assigns groups to servers. A server that is not up gets new groups only if there is no other server."""

    def __init__(self, num_servers: int, *, is_up: Callable[[int], bool] = lambda server: True) -> None:
        self._in_flight = [0] * num_servers
        self._is_up = is_up

    @contextmanager
    def placed(self, request: GroupRequest) -> Iterator[GroupRequest]:
        """Choose a server and yield the request with it. During the block the group counts as load of that server."""
        server = self._seat(request)
        self._in_flight[server] += 1
        try:
            yield replace(request, server=server)
        finally:
            self._in_flight[server] -= 1

    def _seat(self, request: GroupRequest) -> int:
        if request.cohort is not None:
            return server_in_cohort(request.cohort, len(self._in_flight))
        servers = range(len(self._in_flight))
        up = [server for server in servers if self._is_up(server)] or servers
        return min(up, key=lambda server: (self._in_flight[server], server))

    def metrics(self) -> dict[str, float]:
        return {
            "routing/groups_max": float(max(self._in_flight)),
            "routing/groups_min": float(min(self._in_flight)),
        }


@dataclass(frozen=True, slots=True)
class _Call:
    request_id: RequestId
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    on_tokens: OnTokens | None
    answer: asyncio.Future[Completion]


class GroupCalls:
    """`RolloutEngine` over one server for a whole group. `cohort_size` requests start together on this server,
    including those of other groups."""

    def __init__(self, server: VllmServerHandle, *, min_policy_version: int, cohort_size: int) -> None:
        self._server = server
        self._version = min_policy_version
        self._cohort_size = cohort_size
        self._waiting: list[_Call] = []
        self._stored: dict[str, ObjectRef] = {}
        """References to the group's pictures by SHA-256: their bytes travel once, not with every request."""
        self._sending: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        loop = asyncio.get_running_loop()
        sampling = replace(sampling, is_streamed=on_tokens is not None)
        call = _Call(request_id, prompt_ids, sampling, on_tokens, loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            # Send after all tasks that are ready now, so that the group's other trajectories join this call.
            loop.call_soon(self._send)
        try:
            async with asyncio.timeout(self._server.request_timeout_s):
                return await call.answer
        except TimeoutError:
            raise DeadlineError(
                f"{self._server.name} did not answer request {request_id} within {self._server.request_timeout_s:g} s "
                "(rollout.group_deadline_s)"
            ) from None

    def _send(self) -> None:
        calls, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._listen(calls), name=f"calls {self._server.name}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _listen(self, calls: list[_Call]) -> None:
        try:
            async for batch in self._server.generate_many([self._request(call) for call in calls]):
                for position, outcome in batch:
                    if isinstance(outcome, Completion | Exception):
                        _settle(calls[position], outcome)
                    else:
                        _tell(calls[position], outcome)
        except RayappError as error:
            for call in calls:
                _settle(call, error)
        for call in calls:
            _settle(call, EngineError(f"{self._server.name} gave no answer to {call.request_id}"))

    def _request(self, call: _Call) -> GenerateRequest:
        # Only first turns start as a cohort: later turns start when their tools are done, without waiting.
        cohort_size = self._cohort_size if call.request_id.is_first_turn else 1
        sampling = self._with_references(call.sampling) if call.sampling.pictures else call.sampling
        return call.request_id, np.asarray(call.prompt_ids, np.int32), sampling, self._version, cohort_size

    def _with_references(self, sampling: SamplingParams) -> SamplingParams:
        for sha256, encoded in sampling.pictures.items():
            if sha256 not in self._stored:
                self._stored[sha256] = ray.put(encoded)
        return replace(sampling, pictures={sha256: self._stored[sha256] for sha256 in sampling.pictures})


def _tell(call: _Call, token_ids: Sequence[int]) -> None:
    if call.on_tokens is not None and not call.answer.done():
        call.on_tokens(token_ids)


def _settle(call: _Call, outcome: Completion | Exception) -> None:
    if call.answer.done():
        return
    if isinstance(outcome, Exception):
        call.answer.set_exception(outcome)
    else:
        call.answer.set_result(outcome)
