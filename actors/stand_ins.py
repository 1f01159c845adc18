"""A server without an engine and a learner without a model, behind the same Ray calls as the real ones.

For tests and benchmarks of everything around them: the driver, the store, the workers, recovery. Chosen by
`rayapp.driver.cluster.open_cluster(stand_ins=...)`, never by a configuration. What they promise is what the real ones
promise: a server refuses what it has no weights for, and a learner goes on from its checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from actors.calls import INCARNATION
from actors.handles import GenerateRequest
from rayapp.config.config import Config
from rayapp.core.aio import as_they_end
from rayapp.core.errors import EngineDeadError, StaleVersionError, WeightSyncError
from rayapp.core.stall_detection import InHand
from rayapp.core.types import Completion, FloatArray, Group, GroupSummary, SamplingParams, VersionSpan
from rayapp.engine.weights.buckets import WeightBucket
from rayapp.rollout.order import ANY_VERSION


class ScriptedServer:
    """Stands for `VllmServer`: samples tokens that depend on the seed alone.

    Args:
        latency_s: of each completion.
    """

    def __init__(self, config: Config, index: int, must_sync: bool, latency_s: float) -> None:
        self._index = index
        self._latency_s = latency_s
        self._version = 0
        self._is_started = False
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._not_servable = f"vllm-server-{index} has no weights of the learners yet" if must_sync else ""
        self._config = config
        self._in_hand = InHand()
        self._is_going_on = asyncio.Event()
        self._is_going_on.set()
        self._dies_in_update = False

    def __repr__(self) -> str:
        return f"vllm-server-{self._index}"

    async def stall(self) -> None:
        """Answer every ping from now on, and never sample again."""
        self._is_going_on.clear()

    async def die_in_update(self) -> None:
        """End with SIGKILL in the middle of the next weight update."""
        self._dies_in_update = True

    async def start(self) -> dict[str, Any]:
        self._is_started = True
        return {}

    async def incarnation(self) -> str:
        return INCARNATION

    async def ping(self) -> str:
        self._check_started()
        self._in_hand.check_moves(self._config.recovery.stall_replace_s, who=repr(self), work="requests")
        return INCARNATION

    def _check_started(self) -> None:
        if not self._is_started:
            raise EngineDeadError(f"{self!r} has no engine: it is being started")

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: SamplingParams,
        min_policy_version: int = ANY_VERSION,
        cohort_size: int = 1,
    ) -> Completion:
        """Some printable tokens of the test model's alphabet, after `latency_s`."""
        self._check_started()
        with self._in_hand.one():
            return await self._generate(request_id, sampling, min_policy_version)

    async def _generate(self, request_id: str, sampling: SamplingParams, min_policy_version: int) -> Completion:
        await self._is_settled.wait()
        await self._is_going_on.wait()
        if self._not_servable:
            raise WeightSyncError(self._not_servable)
        version = self._version
        if version < min_policy_version:
            raise StaleVersionError(f"{self!r} holds policy version {version}, {request_id} needs {min_policy_version}")
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        token_ids = (34 + np.arange(sampling.max_tokens) + (sampling.seed or 0) % 40).astype(np.int32) % 90 + 2
        return Completion(
            token_ids=token_ids,
            log_probs=np.full(token_ids.size, -1.0, np.float32),
            text="a" * ((sampling.seed or 0) % 5),
            finish_reason="length",
            policy_version=version,
            version_spans=self._spans(version, token_ids.size),
            time_generate_s=self._latency_s,
        )

    def _spans(self, first: int, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Weights that arrive while it samples get the second half of the tokens."""
        if first == self._version or num_tokens < 2:
            return ()
        return (
            VersionSpan(policy_version=first, num_tokens=num_tokens // 2),
            VersionSpan(policy_version=self._version, num_tokens=num_tokens - num_tokens // 2),
        )

    async def generate_many(
        self, requests: list[GenerateRequest]
    ) -> AsyncIterator[list[tuple[int, Completion | Exception]]]:
        """`generate` for each, those that end together together. Errors are values: the others go on."""
        async for ended in as_they_end([self._generate_one(request) for request in requests]):
            yield ended

    async def _generate_one(self, request: GenerateRequest) -> Completion:
        request_id, prompt_ids, sampling, min_policy_version, cohort_size = request
        return await self.generate(request_id, prompt_ids.tolist(), sampling, min_policy_version, cohort_size)

    async def load_weights(self, version: int, buckets: list[Any]) -> dict[str, float]:
        self._is_settled.clear()
        try:
            return await self._load_weights(version, buckets)
        finally:
            self._is_settled.set()

    async def _load_weights(self, version: int, buckets: list[Any]) -> dict[str, float]:
        self._not_servable = f"{self!r} may hold a mixture of two versions"
        num_bytes = 0
        for ref in buckets:
            bucket: WeightBucket = await ref
            num_bytes += bucket.data.nbytes
            if self._dies_in_update:
                os.kill(os.getpid(), signal.SIGKILL)
        self._version, self._not_servable = version, ""
        return {"bytes": float(num_bytes), "copy_s": 0.0, "engine_s": 0.0}

    async def sleep(self) -> bool:
        return False

    async def close(self) -> None:
        self._is_started = False


class InstantLearner:
    """Stands for `Learner`: takes the groups, learns nothing, and knows how many steps it has taken.

    Args:
        latency_s: of each step.
    """

    def __init__(
        self, config: Config, rank: int, world_size: int, master_address: str, master_port: int, latency_s: float
    ) -> None:
        self._rank = rank
        self._latency_s = latency_s
        self._version = 0

    def __repr__(self) -> str:
        return f"learner-{self._rank}"

    def ready(self) -> dict[str, Any]:
        return {"rank": self._rank}

    def train_step(
        self,
        step: int,
        summaries: tuple[GroupSummary, ...],
        assignment: tuple[tuple[int, ...], ...],
        *groups: Group,
    ) -> dict[str, float]:
        assert step == self._version + 1, f"step {step} after {self._version}: state is not that of the step before"
        assert len(groups) == len(assignment[self._rank])
        time.sleep(self._latency_s)
        self._version = step
        return {"learner/steps_taken": float(step)}

    def log_probs_before(self) -> dict[int, FloatArray]:
        return {}

    def export_weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        if self._rank == 0:
            yield WeightBucket(entries=(("w", "uint8", (64,), 0, 64),), data=np.full(64, self._version % 256, np.uint8))

    def begin_checkpoint(self, folder: str, version: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank-{self._rank}").write_text(str(self._version))

    def checkpoint_done(self) -> bool:
        return True

    def load_checkpoint(self, folder: str) -> int:
        self._version = int((Path(folder) / f"rank-{self._rank}").read_text())
        return self._version

    def export_hf(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        return
