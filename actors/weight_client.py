"""Learner 0's client of the servers during a sync: vLLM's four control calls, with a deadline and distinct ranks.

vLLM's own client for Ray waits without a deadline and gives all engines the same ranks. Called by vLLM's trainer side
in the learner's process, from plain threads; the weights themselves never pass here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from actors.handles import VllmServerHandle
from rayapp.core.errors import RayappError, WeightSyncError
from rayapp.engine.weights.sync import TransferRanks


class ServersClient:
    """See the module; the methods are those of vLLM's `VLLMWeightSyncClient`.

    Args:
        timeout_s: deadline of each call, for the slowest server.
    """

    def __init__(self, servers: Sequence[VllmServerHandle], plan: TransferRanks, timeout_s: float) -> None:
        self._servers = servers
        self._plan = plan
        self._timeout_s = timeout_s
        self._version = 0
        self._checksums: Callable[[], dict[str, int]] = dict

    def announce(self, version: int, checksums: Callable[[], dict[str, int]]) -> None:
        """Set the version and checksums of the next `finish_weight_update`; checksums are computed while sending."""
        self._version, self._checksums = version, checksums

    def check(self) -> None:
        """Check that every server is up: vLLM's rendezvous over NCCL waits 300 s for a server that is gone.

        Raises:
            WeightSyncError: a server is not up; names it.
        """
        self._all("ping", [server.actor.ping.remote() for server in self._servers])

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all(
            "join_weight_group",
            [server.actor.join_weight_group.remote(info) for server, info in self.init_infos(init_info)],
        )

    def init_infos(self, init_info: dict[str, Any]) -> list[tuple[VllmServerHandle, dict[str, Any]]]:
        """Return the init info of each server, with ranks of its own: vLLM offers rank 1 to all."""
        if "rank_offset" not in init_info:
            return [(server, init_info) for server in self._servers]
        offsets = self._plan.rank_offsets
        return [(s, init_info | {"rank_offset": offset}) for s, offset in zip(self._servers, offsets, strict=True)]

    def start_weight_update(self) -> None:
        self._all("begin_update", [server.actor.begin_update.remote() for server in self._servers])

    def update_weights(self, update_info: Any) -> None:
        self._all("receive_weights", [server.actor.receive_weights.remote(update_info) for server in self._servers])

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        checksums = self._checksums()
        refs = [server.actor.finish_update.remote(self._version, checksums) for server in self._servers]
        self._all("finish_update", refs)

    def _all(self, what: str, refs: list[Any]) -> None:
        """Wait for every server, or until one has failed: the others may be waiting for that one.

        Raises:
            WeightSyncError: one is gone, refused, or did not answer in time; names it.
        """
        name_of = {ref: server.name for server, ref in zip(self._servers, refs, strict=True)}
        deadline, late = time.monotonic() + self._timeout_s, refs
        while late:
            answered, late = ray.wait(late, timeout=max(0.0, deadline - time.monotonic()), fetch_local=False)
            if not answered:
                raise WeightSyncError(
                    f"{', '.join(f'{name_of[ref]}.{what}' for ref in late)} did not answer within "
                    f"server.sync_timeout_s = {self._timeout_s:g} s"
                )
            for ref in answered:
                try:
                    ray.get(ref, timeout=self._timeout_s)
                except (RayError, RayappError) as error:
                    reason = str(error).strip().splitlines()[-1]
                    raise WeightSyncError(f"{name_of[ref]}.{what}: {reason}") from error
