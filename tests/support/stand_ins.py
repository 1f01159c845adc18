"""An engine without vLLM and a learner without a model, behind the same Ray calls as the real ones.

For tests and benchmarks of everything around them: the driver, the store, the workers, the server actor, recovery. Pass
them to `rayapp.driver.cluster.open_cluster(stand_ins=stand_ins())`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from ray import cloudpickle

from actors.spawn import Role
from actors.starting import StandIn, StandIns
from actors.vllm_server import StartEngine, VllmServer
from rayapp.config.config import Config
from rayapp.core.errors import EngineError, WeightSyncError
from rayapp.core.protocols import OnTokens
from rayapp.core.timing import InHand
from rayapp.core.types import (
    Completion,
    FloatArray,
    Group,
    GroupSummary,
    Int32Array,
    RequestId,
    SamplingParams,
    VersionSpan,
)
from rayapp.engine.weights.buckets import SharedWeights, TensorEntry, WeightBucket
from rayapp.learner.shares import Shares

# Ray sends these classes by value: its workers can't import the folder of tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Scripts = tuple[tuple[tuple[int, ...] | str, ...], ...]

VERSION_TENSOR = "version"
"""The only tensor of a learner without a model: each of its bytes is the policy version."""


class SharedGpus:
    """The logical GPUs that a server and learners share: an engine that is awake and a learner that computes can't have
    their memory at once. Each is a file in the folder of runs, locked until its holder frees it or dies."""

    def __init__(self, config: Config, holder: str) -> None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "") if config.cluster.placement == "colocated" else ""
        node, folder = ray.get_runtime_context().get_node_id(), Path(config.run.output_dir)
        self.files = [folder / f"gpu-{node}-{device}" for device in seen.split(",") if device]
        self._holder, self._locks = holder, list[int]()

    def take(self) -> None:
        """Raises RuntimeError: another process has one of them. Idempotent."""
        for file in self.files[len(self._locks) :]:
            self._locks.append(os.open(file, os.O_CREAT | os.O_RDWR))
            try:
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.free()
                raise RuntimeError(f"{self._holder} has no memory: {file.read_text()} has {file.name}") from None
            file.write_text(self._holder)

    def free(self) -> None:
        while self._locks:
            os.close(self._locks.pop())

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.free()


class SeededEngine:
    """Stands for `VllmEngine` in a server that gets weights through the object store: the seed determines the tokens.

    Args:
        latency_s: seconds of each completion.
        scripts: see `stand_ins`.
    """

    def __init__(self, latency_s: float, gpus: SharedGpus, scripts: Scripts = ()) -> None:
        self._latency_s = latency_s
        self._gpus = gpus
        self._is_awake = asyncio.Event()
        self._is_awake.set()
        self._num_running = 0
        self._scripts = scripts
        self.policy_version = 0
        self.in_hand = InHand()
        self.goes_on = asyncio.Event()
        """Unset: the engine answers every check and never samples again."""
        self.goes_on.set()
        self._arrived: tuple[tuple[TensorEntry, ...], bytes] = ((), b"")
        self.dies_in_update = False
        """If set, the next weight update ends the process with SIGKILL halfway."""

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        cohort_size: int = 1,
    ) -> Completion:
        """Return the script's turn, or printable tokens of the test model's alphabet, after `latency_s`."""
        if not self._is_awake.is_set():
            raise EngineError(f"{request_id} came to an engine that sleeps")
        with self.in_hand.one(), self._running():
            await self.goes_on.wait()
            version = self.policy_version
            if self._latency_s:
                await asyncio.sleep(self._latency_s)
            await self._is_awake.wait()
        if self._scripts:
            text, token_ids = self._scripted(request_id, sampling)
        else:
            token_ids = (34 + np.arange(sampling.max_tokens) + (sampling.seed or 0) % 40).astype(np.int32) % 90 + 2
            text = "a" * ((sampling.seed or 0) % 5)
        return Completion(
            token_ids=token_ids,
            log_probs=np.full(token_ids.size, -1.0, np.float32),
            text=text,
            finish_reason="stop" if self._scripts else "length",
            policy_version=version,
            version_spans=() if self._scripts else self._spans(version, token_ids.size),
            time_generate_s=self._latency_s,
        )

    @contextmanager
    def _running(self) -> Iterator[None]:
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def _scripted(self, request_id: RequestId, sampling: SamplingParams) -> tuple[str, Int32Array]:
        script = self._scripts[(sampling.seed or 0) % len(self._scripts)]
        said = script[max(request_id.turn, 0)]
        return (said, np.array([2], np.int32)) if isinstance(said, str) else ("", np.array(said, np.int32))

    def _spans(self, first: int, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Return the version spans: if weights arrive during sampling, they get the second half of the tokens."""
        if first == self.policy_version or num_tokens < 2:
            return ()
        return (
            VersionSpan(policy_version=first, num_tokens=num_tokens // 2),
            VersionSpan(policy_version=self.policy_version, num_tokens=num_tokens - num_tokens // 2),
        )

    async def begin_update(self, carried: str) -> None:
        if self.dies_in_update:
            os.kill(os.getpid(), signal.SIGKILL)

    async def receive_weights(self, weights: SharedWeights) -> None:
        self._arrived = weights.entries, await asyncio.to_thread(Path(weights.path).read_bytes)

    async def finish_update(self, version: int, checksums: Mapping[str, int]) -> int:
        """Take the weights. `InstantLearner.export_weights` writes their version into them."""
        entries, held = self._arrived
        if [name for name, *_ in entries] == [VERSION_TENSOR] and set(held) != {version % 256}:
            raise WeightSyncError(f"these are not the weights of version {version}")
        self.policy_version = version
        return 0

    async def go_on(self) -> None:
        if not self._is_awake.is_set():
            self._gpus.take()
            self._is_awake.set()

    async def check(self) -> None:
        """Always succeed."""

    async def facts(self) -> dict[str, Any]:
        return {}

    def load(self) -> dict[str, float]:
        return {}

    async def sleep(self, *, keeps_requests: bool = False, drops_weights: bool = False) -> bool:
        if not self._gpus.files:
            return False
        while self._num_running and not keeps_requests:
            await asyncio.sleep(0.01)
        self._is_awake.clear()
        self._gpus.free()
        return True

    def close(self) -> None:
        self._gpus.free()


class ScriptedServer(VllmServer):
    """A server whose engine is a `SeededEngine`, with faults that a test can trigger."""

    def __init__(
        self,
        config: Config,
        index: int,
        must_sync: bool,
        latency_s: float,
        scripts: Scripts = (),
    ) -> None:
        self._gpus = SharedGpus(config, f"vllm-server-{index}")
        self._seeded = SeededEngine(latency_s, self._gpus, scripts)
        super().__init__(config, index, must_sync, start_engine=cast("StartEngine", self._start_seeded))

    async def _start_seeded(self, config: Config, *, seed: int) -> SeededEngine:
        self._gpus.take()
        return self._seeded

    async def stall(self) -> None:
        """Stop sampling, but still answer every ping."""
        self._seeded.goes_on.clear()

    async def die_in_update(self) -> None:
        """End with SIGKILL in the middle of the next weight update."""
        self._seeded.dies_in_update = True


class InstantLearner:
    """Stands for `Learner`: takes the groups, learns nothing, and counts its steps.

    Args:
        latency_s: seconds of each step.
    """

    def __init__(
        self, config: Config, rank: int, world_size: int, master_address: str, master_port: int, latency_s: float
    ) -> None:
        self._rank = rank
        self._data_rank = rank // config.learner.sequence_parallel
        self._latency_s = latency_s
        self._version = 0
        self._gpus = SharedGpus(config, repr(self))

    def __repr__(self) -> str:
        return f"learner-{self._rank}"

    def ready(self) -> dict[str, Any]:
        """Load the model, for as long as a step takes."""
        with self._gpus.taken():
            time.sleep(self._latency_s)
        return {"rank": self._rank}

    def train_step(
        self, step: int, summaries: tuple[GroupSummary, ...], shares: Shares, *groups: Group
    ) -> dict[str, float]:
        assert step == self._version + 1, f"step {step} after {self._version}: state is not that of the step before"
        assert len(groups) == len(shares[self._data_rank])
        with self._gpus.taken():
            time.sleep(self._latency_s)
        self._version = step
        return {"learner/steps_taken": float(step)}

    def log_probs_before(self) -> dict[int, FloatArray]:
        return {}

    def export_weights(self, version: int, bucket_bytes: int) -> Iterator[WeightBucket]:
        if self._rank == 0:
            entry: TensorEntry = (VERSION_TENSOR, "uint8", (64,), 0, 64)
            yield WeightBucket(entries=(entry,), data=np.full(64, self._version % 256, np.uint8), checksums={})

    def begin_checkpoint(self, folder: str, version: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"rank-{self._rank}").write_text(str(self._version))

    def checkpoint_done(self) -> bool:
        return True

    def load_checkpoint(self, folder: str) -> int:
        self._version = int((Path(folder) / f"rank-{self._rank}").read_text())
        return self._version

    def export_hf(self, folder: str) -> None:
        with self._gpus.taken():
            Path(folder).mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        return


SERVER = Role(
    class_path=f"{__name__}:ScriptedServer",
    num_cpus=0.1,
    max_concurrency=100_000,
    max_restarts=-1,
    env_of="rollout-worker",
)
LEARNER = Role(class_path=f"{__name__}:InstantLearner", num_cpus=0.1, env_of="rollout-worker")


def stand_ins(*, completion_s: float = 0.0, step_s: float | None = 0.0, scripts: Scripts = ()) -> StandIns:
    """Return the stand-ins of servers and learners.

    Args:
        completion_s: seconds of each completion.
        step_s: seconds of each step; None: the learners are the real ones.
        scripts: completions of a trajectory, turn by turn; its seed chooses one script. Token ids, or text where no
            test reads token ids. Empty: any tokens.
    """
    found = {"vllm-server": StandIn(role=SERVER, arguments=(completion_s, scripts))}
    if step_s is not None:
        found["learner"] = StandIn(role=LEARNER, arguments=(step_s,))
    return found
