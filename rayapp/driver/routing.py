"""Chooses the server that samples a group. One `Router` in the driver knows all groups in flight.

A group stays on its server: its trajectories share their prompt in that server's prefix cache, and each turn of a
trajectory finds the earlier turns there. A group that starts alone goes to the server with the fewest groups; groups of
a cohort are assigned by their place in it, so that a synchronous run repeats. Pure counting, no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rayapp.core.protocols import OnTokens, RolloutEngine
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.rollout.order import ANY_VERSION, GroupRequest, server_in_cohort

_ALONE = GroupRequest(group_id=0, policy_version=ANY_VERSION)


class Router:
    """Assigns groups to servers.

    Args:
        num_servers: at least one.
        is_up: returns whether the server of this index is available; a server that is being replaced gets no new groups
            unless there is no other.
    """

    def __init__(self, num_servers: int, *, is_up: Callable[[int], bool] = lambda server: True) -> None:
        self._in_flight = [0] * num_servers
        self._is_up = is_up

    @contextmanager
    def placed(self, request: GroupRequest) -> Iterator[GroupRequest]:
        """Context manager for the request with its server; the group counts as the server's load in the block."""
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
        """Return `routing/*`: groups in flight on the server with the most and on the one with the fewest."""
        return {
            "routing/groups_max": float(max(self._in_flight)),
            "routing/groups_min": float(min(self._in_flight)),
        }


class AnyServer:
    """`RolloutEngine` over several servers: each request goes to the one with the fewest requests.

    Args:
        is_up: see `Router`.
    """

    def __init__(self, engines: Sequence[RolloutEngine], *, is_up: Callable[[int], bool] = lambda server: True) -> None:
        self._engines = engines
        self._router = Router(len(engines), is_up=is_up)

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """See `RolloutEngine`."""
        with self._router.placed(_ALONE) as placed:
            assert placed.server is not None
            return await self._engines[placed.server].generate(request_id, prompt_ids, sampling, on_tokens)
