"""vLLM's async engine as a `RolloutEngine`: token ids in, token ids and log-probs out, weights replaced in place.

Used by the vllm-server actor, and directly by tests and tools. The only module, with its worker extension, that knows
vLLM's names.

Admission. On CPU, and on any engine whose kernels choose their blocking by batch size, the last bits of a log-prob
depend on which requests share a batch, and a sampled token can flip on them. So the scheduler stays paused from one
weight update to the moment a whole cohort is queued, in the order of request ids, and the cohort's first seed seeds the
sampler: equal weights and seeds then give equal batches, and a resumed run repeats one that never stopped.
vLLM's own per-request seeds are not used: a generator per row costs as much as the model's forward here, and they crash
the CPU engine of vLLM 0.30 when a prompt is prefilled in parts (`CPU Generator does not use offset`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from rayapp.config.config import Config
from rayapp.core.errors import EngineDeadError, EngineError, WeightSyncError
from rayapp.core.machine import share_of_cores
from rayapp.core.stall_detection import InHand
from rayapp.core.types import Completion, SamplingParams, VersionSpan
from rayapp.engine.cohorts import Cohorts, Request
from rayapp.engine.concurrency import ConcurrencyLimit, Gate
from rayapp.engine.token_versions import TokenVersions
from rayapp.engine.vllm_adapter import adapter_args, adapter_request, is_adapter
from rayapp.engine.vllm_stats import EngineLoad
from rayapp.engine.weights.buckets import TensorEntry
from rayapp.engine.weights.transfer_plan import choose_transport
from rayapp.storage.models.prefetch import with_local_model

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


NO_CHECKSUMS: Mapping[str, int] = MappingProxyType({})


class VllmEngine:
    """One engine; build it with `start`.

    Args:
        engine: vLLM's AsyncLLM.
        load: among its stat loggers, which tell the gate.
        gate: where requests wait that no cohort waits for.
        in_hand: its requests; told of every step that samples tokens.
        patience_s: how long a request waits for its cohort.
    """

    def __init__(self, engine: Any, load: EngineLoad, gate: Gate, in_hand: InHand, patience_s: float) -> None:
        self.in_hand = in_hand
        self._engine = engine
        self._load = load
        self._gate = gate
        self.policy_version = 0
        self._is_paused = False
        self._is_asleep = False
        self._adapter: Any = None
        """vLLM's request of the adapter that every prompt is sampled with; None until one is there."""
        self._cohorts = Cohorts(self._start_cohort, patience_s=patience_s)
        self._versions = TokenVersions()
        self._changing = asyncio.Lock()
        """Held while requests are started and while weights are replaced: a start would wake a frozen engine."""

    @classmethod
    async def start(cls, config: Config, **engine_args: Any) -> VllmEngine:
        """Load the model and be ready to generate.

        Args:
            engine_args: of vLLM's, in place of those that follow from the configuration.
        Raises:
            EngineError: vLLM could not start; the message holds its reason.
        """
        config = await asyncio.to_thread(with_local_model, config)
        _set_process_environment(config)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            gate = Gate(ConcurrencyLimit(ceiling=config.server.max_num_seqs))
            in_hand = InHand()
            load = EngineLoad(lambda kv_used, num: gate.observe(kv_used=kv_used, num_preempted=num), in_hand.moved)
            args = AsyncEngineArgs(**_engine_args(config) | engine_args)
            engine = AsyncLLM.from_engine_args(args, stat_loggers=[load.factory])
            await engine.collective_rpc("die_with", args=(os.getpid(),))
        except Exception as error:  # boundary: vLLM raises whatever its dependencies raise
            raise EngineError(
                f"vLLM did not start with {config.model.path}: {type(error).__name__}: {error}"
            ) from error
        return cls(engine, load, gate, in_hand, config.recovery.stall_replace_s / 2)

    def load(self) -> dict[str, float]:
        """See `EngineLoad.scalars` and `Gate.scalars`."""
        return self._load.scalars() | self._gate.scalars()

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, *, cohort_size: int = 1
    ) -> Completion:
        """Sample one completion.

        Args:
            request_id: unique among those in flight.
            cohort_size: requests that start together with this one, itself included.
        Raises:
            EngineDeadError: the engine's process is gone.
            EngineError: it refuses this request, or gave it up.
        """
        request = Request(request_id, prompt_ids, sampling)
        with self.in_hand.one():
            if cohort_size > 1:
                # All of a cohort starts at once: which of it ran together must not follow from what the cache held.
                with self._gate.passing():
                    return await self._sample(request, cohort_size)
            async with self._gate.seat(request.order()):
                return await self._sample(request, 1)

    async def _sample(self, request: Request, cohort_size: int) -> Completion:
        started, request_id = request.created_s, request.request_id
        queue = await self._cohorts.admit(request, cohort_size)
        admitted = time.monotonic()
        try:
            output = (await queue.get()).outputs[0]
            spans = self._versions.end(queue.request_id, self.policy_version, len(output.token_ids))
        except asyncio.CancelledError:
            await asyncio.shield(self._engine.abort(queue.request_id, internal=True))
            raise
        except Exception as error:  # boundary: vLLM
            raise self._engine_error(error, request_id) from error
        finally:
            self._versions.forget(queue.request_id)
            queue.close()
        generate_s = time.monotonic() - admitted
        return whole_completion(request_id, output, spans, self.policy_version, admitted - started, generate_s)

    async def _start_cohort(self, cohort: list[Request]) -> None:
        """Queue requests in the order of their ids, and let the scheduler see them all at once."""
        async with self._changing:
            try:
                if len(cohort) > 1:
                    await self.pause()
                    await self._engine.collective_rpc("seed_sampling", args=(cohort[0].sampling.seed,))
                for request in cohort:
                    await self._begin(request)
                await self._resume()
            except Exception as error:  # boundary: vLLM
                raise self._engine_error(error, cohort[0].request_id) from error

    async def _begin(self, request: Request) -> None:
        """Queue one, unless whoever asked has gone: before, or meanwhile."""
        if request.queue.done():
            return
        try:
            queue = await self._add(request)
        except EngineError as error:
            if not request.queue.done():
                request.queue.set_exception(error)
            return
        if not request.queue.done():
            request.queue.set_result(queue)
            return
        self._versions.forget(queue.request_id)
        queue.close()
        await self._engine.abort(queue.request_id, internal=True)

    async def _add(self, request: Request) -> Any:
        # The salt keeps the prefix cache apart by version: blocks computed with older weights are never read again and
        # leave by age, without a flush that would cost the running requests theirs. And apart by purpose: a cohort
        # that finds its prompts cached by an evaluation computes other batches than one that does not.
        purpose = request.request_id.partition("=")[0]
        if purpose == "group" and (request.sampling.top_p < 1.0 or request.sampling.top_k > 0):
            raise EngineError(
                f"{request.request_id}: top_p {request.sampling.top_p:g}, top_k {request.sampling.top_k} would bias "
                "the log-probs that training uses; only evaluation may filter"
            )
        prompt = {"prompt_token_ids": list(request.prompt_ids), "cache_salt": f"{purpose} {self.policy_version}"}
        try:
            params = _sampling_params(request.sampling)
            queue = await self._engine.add_request(request.request_id, prompt, params, lora_request=self._adapter)
            self._versions.begin(queue.request_id)
            return queue
        except Exception as error:  # boundary: vLLM
            raise self._engine_error(error, request.request_id) from error

    async def load_weights(
        self, version: int, path: str, entries: Sequence[TensorEntry], checksums: Mapping[str, int] = NO_CHECKSUMS
    ) -> int:
        """Replace the weights by those in a shared-memory file. Requests in flight go on from their tokens behind it.

        Args:
            checksums: of a sample of tensors, made by the learner.
        Returns:
            Number of tensors that the model was found to hold as the learner sent them.
        Raises:
            WeightSyncError: the engine may hold a mixture now; it must not generate.
        """
        async with self._changing:
            await self._freeze()
            num_held = await self._replace_weights(version, path, entries, checksums)
            if self._versions.num_open:
                await self._resume()
        return num_held

    async def _replace_weights(
        self, version: int, path: str, entries: Sequence[TensorEntry], checksums: Mapping[str, int]
    ) -> int:
        try:
            # The cache comes back last: the learners' gradients may still be on the GPU while the weights are loaded.
            await self._wake("weights")
            held = await self._engine.collective_rpc("load_shared_weights", args=(path, list(entries), dict(checksums)))
            await self._wake("kv_cache")
        except Exception as error:  # boundary: vLLM
            raise WeightSyncError(f"version {version} was not loaded: {type(error).__name__}: {error}") from error
        self._adapter = adapter_request() if is_adapter(entries) else None
        self._is_asleep = False
        self.policy_version = version
        return int(min(held))

    async def join_weight_group(self, init_info: dict[str, Any]) -> None:
        """vLLM's `init_weight_transfer_engine`. Blocks until everybody has joined.

        Raises:
            WeightSyncError: a worker could not.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._transfer("join", self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    async def begin_update(self) -> None:
        """Freeze what runs, and make the workers ready for weights. `finish_update` undoes it.

        Raises:
            WeightSyncError: a worker is not.
        """
        await self._changing.acquire()
        await self._freeze()
        await self._wake("weights")
        await self._transfer("begin", self._engine.start_weight_update())

    async def receive_weights(self, update_info: Any) -> None:
        """vLLM's `update_weights`: returns when the workers have loaded what `update_info` describes.

        Raises:
            WeightSyncError: they may hold a mixture now; the engine must not generate.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._transfer("receive", self._engine.update_weights(WeightTransferUpdateRequest(update_info)))

    async def finish_update(self, version: int, checksums: Mapping[str, int]) -> int:
        """Seal the update as this version, and go on. Returns the number of tensors found to be held as sent.

        Raises:
            WeightSyncError: the model does not hold what was sent; the engine must not generate.
        """
        await self._transfer("finish", self._engine.finish_weight_update())
        held = await self._transfer("check", self._engine.collective_rpc("seal_weights", args=(dict(checksums),)))
        await self._wake("kv_cache")
        self._is_asleep = False
        self.policy_version = version
        if self._versions.num_open:
            await self._resume()
        self._changing.release()
        return int(min(held))

    async def _transfer(self, phase: str, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except Exception as error:  # boundary: vLLM
            raise WeightSyncError(f"weight update, {phase}: {type(error).__name__}: {error}") from error

    async def sleep(self) -> bool:
        """Give the GPU's memory to the learners until the next `load_weights`. False where vLLM can't: on CPU.

        Not run on a GPU yet.

        Raises:
            EngineDeadError: the engine does not answer.
        """
        if not self._engine.model_config.enable_sleep_mode:
            return False
        await self.pause()
        try:
            await self._engine.sleep(level=1)
        except Exception as error:  # boundary: vLLM
            raise EngineDeadError(f"the engine kept its memory: {type(error).__name__}: {error}") from error
        self._is_asleep = True
        return True

    async def _wake(self, what: str) -> None:
        if self._is_asleep:
            await self._engine.wake_up(tags=[what])

    async def pause(self) -> None:
        """Finish what runs, then schedule nothing until the next cohort is queued."""
        if not self._is_paused:
            await self._engine.pause_generation(mode="wait", clear_cache=False)
            self._is_paused = True

    async def _freeze(self) -> None:
        """Stop between two tokens, and write down which tokens the weights held now have sampled."""
        if not self._is_paused:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            self._is_paused = True
        self._versions.close_version(self.policy_version, self._num_sampled)

    def _num_sampled(self, request_id: str) -> int | None:
        """Tokens sampled for a request so far; None if vLLM has ended it, whether or not its output was fetched."""
        state = self._engine.output_processor.request_states.get(request_id)
        return None if state is None else int(state.detokenizer.num_output_tokens())

    async def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            await self._engine.resume_generation()

    async def check(self) -> None:
        """Return if the engine's processes answer.

        Raises:
            EngineDeadError: one of them is gone.
        """
        try:
            await self._engine.check_health()
            await self._engine.collective_rpc("answer")
        except Exception as error:  # boundary: vLLM
            raise EngineDeadError(f"the engine's process does not answer: {type(error).__name__}: {error}") from error

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> np.ndarray:
        """(T-1,) log-probability of each token given those before it, at temperature 1, as this engine computes it."""
        from vllm import SamplingParams as VllmSamplingParams

        params = VllmSamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0)
        # A salt of its own: cached blocks would be skipped, and give no log-probs.
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": f"log-probs={time.monotonic_ns()}"}
        await self._resume()
        outputs = self._engine.generate(prompt, params, f"log-probs-{time.monotonic_ns()}", lora_request=self._adapter)
        rows = [output.prompt_logprobs async for output in outputs][-1]
        chosen = [row[token].logprob for row, token in zip(rows[1:], token_ids[1:], strict=True)]
        return np.array(chosen, np.float32)

    async def facts(self) -> dict[str, Any]:
        import vllm

        cache = self._engine.vllm_config.cache_config
        return {
            "vllm": vllm.__version__,
            "kv_blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
            "max_model_tokens": self._engine.model_config.max_model_len,
        }

    def close(self) -> None:
        """End the engine's processes. Idempotent."""
        self._engine.shutdown()

    def _engine_error(self, error: Exception, request_id: str) -> EngineError:
        if self._engine.errored:
            return EngineDeadError(f"the engine's process died while it served {request_id}: {error}")
        return EngineError(f"the engine refused {request_id}: {type(error).__name__}: {error}")


def _set_process_environment(config: Config) -> None:
    """What vLLM reads from the environment when it is imported; child processes inherit it."""
    threads = config.server.cpu_threads or share_of_cores(
        config.server.num_servers, is_synchronous=config.train.max_staleness == 0
    )
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.server.kv_cache_gib)
    # Ray sets this to the actor's num_cpus, which is a share for scheduling, not the number of cores to compute on.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    tp = config.server.tensor_parallel_size
    # Else vLLM runs even a single CPU rank behind its multi-process executor, which spins on a queue beside it and pins
    # its threads: 1.6 times slower on 2 cores. The engine core stays a process of its own either way.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if tp > 1 else "0"
    if tp > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        cores = sorted(os.sched_getaffinity(0))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(tp))


def _engine_args(config: Config) -> dict[str, Any]:
    server = config.server
    return {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": server.dtype,
        "max_model_len": config.max_model_tokens,
        "tensor_parallel_size": server.tensor_parallel_size,
        "distributed_executor_backend": "mp" if server.tensor_parallel_size > 1 else "uni",
        "gpu_memory_utilization": server.gpu_memory_utilization,
        "block_size": server.kv_block_tokens or None,
        "max_num_seqs": server.max_num_seqs,
        "enforce_eager": server.enforce_eager,
        "enable_prefix_caching": True,
        # The distribution that was sampled from; vLLM's default is the one before temperature.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rayapp.engine.vllm_worker.WeightUpdateExtension",
        "seed": config.run.seed,
        # A model's generation_config.json may hold top_k or a repetition penalty: sampling is what we say it is.
        "generation_config": "vllm",
        "disable_log_stats": False,
        "enable_sleep_mode": config.cluster.placement == "colocated" and _has_gpu(),
        **_transfer_args(config),
        **adapter_args(config),
    }


def _transfer_args(config: Config) -> dict[str, Any]:
    transport = choose_transport(config, on_gpu=config.cluster.device != "cpu" and _has_gpu())
    if transport == "object_store":
        return {}
    from vllm.config.weight_transfer import WeightTransferConfig

    if transport == "ipc":
        # Handles of GPU memory are no plain data, and the only processes that talk here are our own.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return {"weight_transfer_config": WeightTransferConfig(backend=transport)}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _sampling_params(sampling: SamplingParams) -> Any:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop=list(sampling.stop),
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def whole_completion(
    request_id: str,
    output: Any,
    spans: tuple[VersionSpan, ...],
    policy_version: int,
    queued_s: float,
    generate_s: float,
) -> Completion:
    """What vLLM sampled, which the policy itself ended or the limit of tokens did.

    Raises:
        EngineError: the engine ended it (abort, error, repetition): half an answer that nobody may judge or train on.
    """
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"vLLM gave {request_id} up after {len(output.token_ids)} tokens (finish reason {output.finish_reason})"
        )
    token_ids = np.array(output.token_ids, np.int32)
    log_probs = np.array(output.logprobs.logprobs, np.float32)
    if log_probs.size != token_ids.size:
        raise EngineError(f"vLLM gave {log_probs.size} log-probs for {token_ids.size} sampled tokens")
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        text=output.text,
        finish_reason=output.finish_reason,
        policy_version=spans[0].policy_version if spans else policy_version,
        version_spans=spans if len(spans) > 1 else (),
        time_queued_s=queued_s,
        time_generate_s=generate_s,
    )
