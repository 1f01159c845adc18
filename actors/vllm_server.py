"""`vllm-server-N`: one vLLM engine behind Ray calls. A thin actor around `rayapp.engine.vllm`.

It refuses to generate with an older policy version than required, and with a possible mixture of two versions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from actors.handles import GenerateRequest, Restartable
from actors.metrics import Reporter
from rayapp.config.config import Config, with_values
from rayapp.core.aio import News, as_they_end
from rayapp.core.errors import EngineDeadError, StaleVersionError, WeightSyncError
from rayapp.core.logs import about, label_logs
from rayapp.core.protocols import OnTokens
from rayapp.core.timing import Profile
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.engine.vllm import VllmEngine
from rayapp.engine.vllm_arguments import gpu_bytes
from rayapp.engine.weights.buckets import SharedWeights, TensorEntry, WeightBucket
from rayapp.rollout.order import ANY_VERSION

log = logging.getLogger(__name__)
StartEngine = Callable[..., Awaitable[VllmEngine]]
REPORT_EVERY_S = 5.0
STREAM_EVERY_S = 0.03
RESERVE_BYTES = 2**30  # of a GPU, kept by the CUDA driver


def with_planned_share(config: Config) -> Config:
    """Replace `server.gpu_memory_utilization: auto` by the share that the plan gives on this machine's GPUs."""
    if config.server.gpu_memory_utilization != "auto":
        return config
    from rayapp.learner.memory.plan import without_autos
    from rayapp.learner.memory.shape import Gpu, model_shape

    if not (total := gpu_bytes()):
        return config
    room = total - RESERVE_BYTES
    gpu = Gpu(name="here", room=room, tflops=1, memory_gb_s=1, link_gb_s=1)  # memory does not depend on the speed
    planned = without_autos(model_shape(config), config, gpu)
    log.info("server.gpu_memory_utilization is auto: the plan gives it %g", planned.server.gpu_share)
    share = {"gpu_memory_utilization": planned.server.gpu_share}
    return with_values(config, server=share)  # learners replace their own `auto` by a measurement


class VllmServer(Restartable):
    """Actor of one vLLM server. With `must_sync` it refuses to generate until weights are loaded: a restarted server
    holds the base model's weights."""

    def __init__(
        self,
        config: Config,
        index: int,
        must_sync: bool = False,
        start_engine: StartEngine = VllmEngine.start,
    ) -> None:
        label_logs(config.run.name)
        self._config = config
        self._index = index
        self._start_engine = start_engine
        self._engine: VllmEngine | None = None
        self._not_servable = f"vllm-server-{index} has no weights of the learners yet" if must_sync else ""
        self._reporting: asyncio.Task[None] | None = None
        # Event that is unset while weights arrive: new requests wait, requests in flight are frozen.
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._is_sealed = False  # new weights are loaded and checked, and `go_on` has not been called yet

    def __repr__(self) -> str:
        return f"vllm-server-{self._index}"

    async def start(self) -> dict[str, Any]:
        started = time.monotonic()
        # Use a different seed for each server: with equal seeds, servers would sample the same completions.
        self._config = await asyncio.to_thread(with_planned_share, self._config)
        seed = self._config.run.seed + self._index
        self._engine = await self._start_engine(self._config, seed=seed)
        self._reporting = asyncio.create_task(self._report_for_ever(self._engine), name="report load")
        return await self._engine.facts() | {"start_s": time.monotonic() - started, "pid": os.getpid()}

    async def _report_for_ever(self, engine: VllmEngine) -> None:
        reporter = Reporter(self._config.run.name)
        while True:
            reporter.report({f"server/{self!r}/{name}": value for name, value in engine.load().items()})
            await asyncio.sleep(REPORT_EVERY_S)

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: list[int],
        sampling: SamplingParams,
        min_policy_version: int = ANY_VERSION,
        cohort_size: int = 1,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """See `VllmEngine.generate`. StaleVersionError: this server's weights are older than needed."""
        # Set no deadline: the caller has one, and a server whose update never finishes is ended at the sync's deadline.
        await self._is_settled.wait()
        engine = self._ready_engine()
        if engine.policy_version < min_policy_version:
            raise StaleVersionError(
                f"{self!r} holds policy version {engine.policy_version}, but request {request_id} needs version "
                f"{min_policy_version} or a newer one"
            )
        return await engine.generate(request_id, prompt_ids, sampling, on_tokens, cohort_size=cohort_size)

    async def generate_many(
        self, requests: list[GenerateRequest]
    ) -> AsyncIterator[list[tuple[int, Completion | Exception | Sequence[int]]]]:
        """Sample a completion for every request; yield lists of the results that end together, errors among them.
        Streamed requests also yield their new tokens, about every STREAM_EVERY_S seconds."""
        news = News[Sequence[int]](every_s=STREAM_EVERY_S)
        coroutines = [self._generate_one(request, partial(news.told, i)) for i, request in enumerate(requests)]
        async for ended in as_they_end(coroutines, news):
            yield ended

    async def _generate_one(self, request: GenerateRequest, on_tokens: OnTokens) -> Completion:
        request_id, prompt_ids, sampling, version, cohort_size = request
        listener = on_tokens if sampling.is_streamed else None
        if sampling.pictures:
            sampling = replace(sampling, pictures={name: await ref for name, ref in sampling.pictures.items()})
        return await self.generate(request_id, prompt_ids.tolist(), sampling, version, cohort_size, listener)

    async def load_weights(self, version: int, buckets: list[Any]) -> dict[str, float]:
        """Load a policy version from references to `WeightBucket`s: a whole update, from `begin_update` to `go_on`.
        After a WeightSyncError the engine may hold mixed weights, and the server must be replaced."""
        engine = await self._expect_weights()
        try:
            return await self._load_weights(engine, version, buckets)
        finally:
            self._settle()

    async def _load_weights(self, engine: VllmEngine, version: int, buckets: list[Any]) -> dict[str, float]:
        started = time.monotonic()
        # Use a file in memory without a name. If this process is killed, the file is gone, and it does not use
        # /dev/shm, which has 64 MB by default in a container. The engine's processes open the file through /proc.
        with os.fdopen(os.memfd_create("rayapp-weights"), "wb") as file:
            weights = await _copied(buckets, file)
            copied = time.monotonic()
            await engine.begin_update("memory")
            await engine.receive_weights(weights)
            num_loaded = await self.finish_update(version, weights.checksums)
            await self.go_on()
            num_bytes = file.tell()
        with about(step=version):
            log.info("holds policy version %d: %.0f MB in %.1f s", version, num_bytes / 1e6, time.monotonic() - started)
        return {
            "bytes": float(num_bytes),
            "copy_s": copied - started,
            "engine_s": time.monotonic() - copied,
            "num_loaded": float(num_loaded),
        }

    async def join_weight_group(self, init_info: dict[str, Any]) -> None:
        """Make the engine's workers members of the learners' group, until they join another."""
        await self._started_engine().join_weight_group(init_info)

    async def begin_update(self) -> None:
        """Prepare for weights that come through the group: new requests wait, requests in flight freeze."""
        engine = await self._expect_weights()
        await engine.begin_update()

    async def _expect_weights(self) -> VllmEngine:
        """Let requests wait until the following update finishes; they are refused if it fails."""
        await self.go_on()  # the learners may have died before they called `go_on` for the last update
        engine = self._started_engine()
        self._is_settled.clear()
        self._not_servable = f"{self!r} may hold a mixture of two versions: its last weight update did not finish"
        return engine

    async def receive_weights(self, update_info: Any) -> None:
        await self._started_engine().receive_weights(update_info)

    async def finish_update(self, version: int, checksums: Mapping[str, int]) -> int:
        """Check the weights that have arrived, and return the number of loaded tensors. After a WeightSyncError the
        server must be replaced."""
        num_loaded = await self._started_engine().finish_update(version, checksums)
        self._is_sealed = True
        return num_loaded

    async def go_on(self) -> int:
        """Sample with the weights of a finished update: a sleeping server allocates its memory again, and frozen
        requests continue. Return the policy version; -1 if the server holds none, or only part of an update."""
        engine = self._engine
        if self._is_sealed and engine is not None:
            await engine.go_on()
            self._is_sealed, self._not_servable = False, ""
            self._settle()
        return -1 if self._not_servable or engine is None else engine.policy_version

    def _settle(self) -> None:
        if self._engine is not None:
            self._engine.in_hand.moved()  # being frozen is not a stall
        self._is_settled.set()

    async def prompt_log_probs(self, sequences: list[list[int]]) -> list[Any]:
        """Return log-probs (T-1,) of each sequence's tokens under the present weights."""
        return [await self._ready_engine().prompt_log_probs(token_ids) for token_ids in sequences]

    async def begin_profile(self) -> None:
        await self._ready_engine().begin_profile()

    async def end_profile(self) -> Profile:
        return await self._started_engine().end_profile(repr(self))

    async def policy_version(self) -> int:
        return self._ready_engine().policy_version

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    async def sleep(self) -> bool:
        """Free the GPU's memory, see `VllmEngine.sleep`. The server generates nothing until the next weights. With
        `train.partial_rollouts` requests in flight are kept, and new ones wait."""
        engine, keeps = self._started_engine(), self._config.train.partial_rollouts
        if keeps:
            self._is_settled.clear()
        sends_adapter = self._config.learner.lora.sends_adapter
        is_asleep = await engine.sleep(keeps_requests=keeps, drops_weights=not sends_adapter)
        if is_asleep:
            self._not_servable = f"{self!r} sleeps while the learners train"
        return is_asleep

    async def ping(self) -> str:
        """Return the `incarnation` if the engine answers and its requests make progress."""
        engine = self._started_engine()
        await engine.check()
        if self._is_settled.is_set():  # during a weight update the sync's deadline applies
            engine.in_hand.check_moves(self._config.recovery.stall_replace_s, who=repr(self), work="requests")
        return await self.incarnation()

    def _started_engine(self) -> VllmEngine:
        if self._engine is None:
            raise EngineDeadError(f"{self!r} can't generate: its engine is being started")
        return self._engine

    def _ready_engine(self) -> VllmEngine:
        engine = self._started_engine()
        if self._not_servable:
            raise WeightSyncError(self._not_servable)
        return engine


async def _copied(buckets: list[Any], file: Any) -> SharedWeights:
    """Copy buckets into a file that the engine's processes, no Ray workers, can map."""
    entries: list[TensorEntry] = []
    checksums: dict[str, int] = {}
    for ref in buckets:
        bucket: WeightBucket = await ref
        start = file.tell()
        file.write(bucket.data.data)
        checksums |= bucket.checksums
        entries += [(name, dtype, shape, start + offset, size) for name, dtype, shape, offset, size in bucket.entries]
    file.flush()
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    return SharedWeights(path=path, entries=tuple(entries), checksums=checksums)
