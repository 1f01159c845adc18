"""vLLM's async engine as a `RolloutEngine`: token ids in, token ids and log-probs out, weights replaced in place.

Equal weights and seeds give equal completions. On CPU the last bits of a log-prob depend on which requests share a
batch, and can flip a token. So the requests of a step start as one cohort: the scheduler stays paused until all are
queued, in the order of ids.

vLLM's second model runner, on GPUs, draws each request's noise from its own seed. The first, on CPUs, would make a
generator per seed, as costly as the model's forward, and crashes vLLM 0.30 when a prompt is prefilled in parts. So
there all requests share one generator, seeded with the first seed of the cohort.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from rayapp.config.config import Config, with_number_formats
from rayapp.config.engine_args import check_names
from rayapp.core.errors import EngineDeadError, EngineError, WeightSyncError
from rayapp.core.protocols import OnTokens
from rayapp.core.timing import MOST_ITERATIONS, InHand, Profile, take_engine_trace
from rayapp.core.types import Completion, RequestId, SamplingParams
from rayapp.engine.admission import Cohorts, Gate, Request
from rayapp.engine.vllm_arguments import (
    adapter_request,
    check_gpu,
    is_adapter,
    is_on_gpu,
    is_sent_whole,
    set_process_environment,
    vllm_args,
)
from rayapp.engine.vllm_forms import FormReader
from rayapp.engine.vllm_output import (
    EngineLoad,
    EngineOutput,
    TokenVersions,
    last_output,
    plain_error,
    text_of,
    vllm_sampling_params,
    way_out,
    whole_completion,
)
from rayapp.engine.vllm_pictures import check_expansion, engine_prompt, open_pictures
from rayapp.engine.weights.buckets import SharedWeights
from rayapp.storage.models.fetch import with_local_model

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

Carried = Literal["group", "memory"]


class VllmEngine:
    """One vLLM engine; build it with `start`. `load` is a stat logger that updates the `gate`; `in_hand` are requests
    being served, to detect a stall; an error's cause is searched in `output`."""

    def __init__(
        self, engine: Any, load: EngineLoad, gate: Gate, in_hand: InHand, output: EngineOutput, patience_s: float
    ) -> None:
        self.in_hand = in_hand
        self._output = output
        self._engine = engine
        self._load = load
        self._gate = gate
        self.policy_version = 0
        self._is_paused = False
        self._is_asleep = False
        self._seeds_requests: bool = engine.vllm_config.use_v2_model_runner  # the second model runner
        self._returns_experts: bool = engine.model_config.enable_return_routed_experts
        self._is_sent_whole = is_sent_whole(engine.model_config)
        self._tokenizer = getattr(engine.get_tokenizer(), "_tokenizer", None)  # None if it is not one of `tokenizers`
        self._placeholder: int | None = getattr(engine.model_config.hf_config, "image_token_id", None)
        self._adapter: Any = None  # the policy's LoRARequest, once an adapter is loaded
        self._cohorts = Cohorts(self._start_cohort, patience_s=patience_s)
        self._versions = TokenVersions()
        self._forms = FormReader(engine)
        # Transport of the update in progress, until `go_on`; it stays set if the update fails midway.
        self._updating: Carried | None = None
        self._num_loaded = 0  # tensors of the last update
        # True from `sleep` to `go_on` if requests in flight are kept; `_changing` is held for that time.
        self._is_holding = False
        # Lock held while requests start or weights are replaced: starting a request would wake a frozen engine.
        self._changing = asyncio.Lock()

    @classmethod
    async def start(cls, config: Config, **engine_args: Any) -> VllmEngine:
        """Load the model and be ready to generate. `engine_args` override the configuration's. EngineError: vLLM could
        not start. ConfigError: this machine lacks what the configuration asks for."""
        check_gpu(config)
        config = await asyncio.to_thread(
            with_local_model, with_number_formats(config, on_gpu=is_on_gpu(config.cluster))
        )
        set_process_environment(config)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_names(config.server.engine_args, (field.name for field in fields(AsyncEngineArgs)))
        output = EngineOutput()
        try:
            gate = Gate(config.server.max_num_seqs)
            in_hand = InHand()
            load = EngineLoad(gate.observe, in_hand.moved)
            args = AsyncEngineArgs(**vllm_args(config) | engine_args)
            engine = AsyncLLM.from_engine_args(args, stat_loggers=[load.factory])
            await engine.collective_rpc("die_with", args=(os.getpid(),))
        except Exception as error:  # vLLM raises whatever its dependencies raise
            why = f"{type(error).__name__}: {error}{output.cause()}"
            raise EngineError(f"vLLM did not start with {config.model.path}: {why}{way_out(why)}") from error
        return cls(engine, load, gate, in_hand, output, config.recovery.stall_replace_s / 2)

    def load(self) -> dict[str, float]:
        return self._load.scalars() | self._gate.scalars()

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
        *,
        cohort_size: int = 1,
    ) -> Completion:
        """Sample one completion. `cohort_size` requests, this one included, start together.

        EngineDeadError: the process is gone. EngineError: the engine refuses this request, or ended it early.
        """
        request = Request(request_id, prompt_ids, replace(sampling, is_streamed=on_tokens is not None))
        with self.in_hand.one():
            if cohort_size > 1:
                # A cohort does not wait for the gate: which requests share a batch must not depend on the cache.
                with self._gate.passing():
                    return await self._sample(request, cohort_size, on_tokens)
            async with self._gate.enter(request_id):
                return await self._sample(request, 1, on_tokens)

    async def _sample(self, request: Request, cohort_size: int, on_tokens: OnTokens | None) -> Completion:
        started, request_id = request.created_s, request.request_id
        if request.sampling.media:  # now: between admission and vLLM's queue no weights may change
            request.pictures = await open_pictures(request.sampling)
        queue = await self._cohorts.admit(request, cohort_size)
        admitted = time.monotonic()
        try:
            ended = await last_output(queue, on_tokens)
            output = ended.outputs[0]
            check_expansion(request.request_id, request.sampling, request.prompt_ids, ended.prompt_token_ids)
            spans = self._versions.end(queue.request_id, self.policy_version, len(output.token_ids))
        except asyncio.CancelledError:
            await asyncio.shield(self._engine.abort(queue.request_id, internal=True))
            raise
        except EngineError:
            raise
        except Exception as error:  # vLLM may raise anything
            raise self._engine_error(error, request_id) from error
        finally:
            self._versions.forget(queue.request_id)
            queue.close()
        generate_s = time.monotonic() - admitted
        waited_s, num_routed = admitted - started, self._num_routed(request, len(output.token_ids))
        whole = whole_completion(request_id, output, spans, self.policy_version, waited_s, generate_s, num_routed)
        if not self._vllm_writes_text(request.sampling):
            spoken_ids = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
            whole = replace(whole, text=text_of(self._tokenizer, request.prompt_ids, spoken_ids))
        if not (request.sampling.wants_allowed and request.sampling.structured_outputs):
            return whole
        return replace(whole, allowed=await self._forms.allowed(request_id, request.sampling, whole.token_ids))

    def _vllm_writes_text(self, sampling: SamplingParams) -> bool:
        return bool(sampling.stop) or self._tokenizer is None

    def _num_routed(self, request: Request, num_sampled: int) -> int | None:
        """Return the tokens whose experts vLLM must return, if the completion is trained on."""
        if not self._returns_experts or request.request_id.purpose != "group":
            return None
        return len(request.prompt_ids) - request.sampling.num_routed + num_sampled - 1

    async def _start_cohort(self, cohort: list[Request]) -> None:
        """Queue requests while the scheduler is paused, so that it sees them all at once."""
        async with self._changing:
            try:
                if len(cohort) > 1:
                    await self.pause()
                    if not self._seeds_requests:
                        await self._engine.collective_rpc("seed_sampling", args=(cohort[0].sampling.seed,))
                for request in cohort:
                    await self._begin(request)
                await self._resume()
            except Exception as error:  # vLLM may raise anything
                raise self._engine_error(error, cohort[0].request_id) from error

    async def _begin(self, request: Request) -> None:
        """Queue a request unless its caller is gone; abort it if the caller goes away meanwhile."""
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
        # The cache salt separates prefix-cache blocks of different weights: old blocks are never read again and are
        # evicted by age, while a flush would also drop the blocks of running requests. The salt also separates
        # purposes: a cohort whose prompts an evaluation had cached would be computed in other batches.
        purpose = request.request_id.purpose
        if purpose == "group" and (request.sampling.top_p < 1.0 or request.sampling.top_k > 0):
            sampling = request.sampling
            filtering = f"top_p {sampling.top_p:g}" if sampling.top_p < 1.0 else f"top_k {sampling.top_k}"
            raise EngineError(
                f"{request.request_id}: {filtering} is for evaluation only, because it would bias the log-probs that "
                "training uses"
            )
        salt = {"cache_salt": f"{purpose} {self.policy_version}"}
        try:
            prompt = engine_prompt(request.prompt_ids, request.sampling, request.pictures, self._placeholder) | salt
            with_text = self._vllm_writes_text(request.sampling)
            params = vllm_sampling_params(request.sampling, with_seed=self._seeds_requests, with_text=with_text)
            queue = await self._engine.add_request(str(request.request_id), prompt, params, lora_request=self._adapter)
            self._versions.begin(queue.request_id)
            return queue
        except Exception as error:  # vLLM may raise anything
            raise self._engine_error(error, request.request_id) from error

    async def join_weight_group(self, init_info: dict[str, Any]) -> None:
        """Join the process group for weight transfers, with all members. WeightSyncError: a worker could not."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._transfer("leave", self._engine.collective_rpc("leave_weight_group"))
        await self._transfer("join", self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    async def begin_update(self, carried: Carried = "group") -> None:
        """Freeze the requests in flight and prepare the workers for weights, until `go_on`. WeightSyncError: a worker
        is not ready, or an earlier update never ended; the engine must be replaced."""
        if self._updating is not None:
            raise WeightSyncError(
                "no weight update can begin: an earlier weight update never ended, and the engine may hold a mixture "
                "of two versions"
            )
        self._updating = carried
        await self._hold()
        # The KV cache gets its memory back last: the learners' gradients may still be on the GPU during the update.
        await self._transfer("wake", self._wake("weights"))
        if carried == "group":
            await self._transfer("begin", self._engine.start_weight_update())

    async def receive_weights(self, update: Any) -> None:
        """Load `SharedWeights`, or tensors that the group sends (by vLLM's description), on all workers.
        WeightSyncError: they may hold mixed weights; the engine must not generate."""
        if isinstance(update, SharedWeights):
            args = (update.path, list(update.entries), dict(update.checksums))
            loaded = await self._transfer("receive", self._engine.collective_rpc("load_shared_weights", args=args))
            self._num_loaded = int(min(loaded))
            self._adapter = adapter_request() if is_adapter(update.entries) else None
            return
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._transfer("receive", self._engine.update_weights(WeightTransferUpdateRequest(update)))

    async def finish_update(self, version: int, checksums: Mapping[str, int]) -> int:
        """Check the weights that arrived, and set the policy version; requests use them only after `go_on`. Return the
        number of tensors. WeightSyncError: other weights arrived than were sent (by `checksums` of some that the group
        sent)."""
        if self._updating == "group":
            await self._transfer("finish", self._engine.finish_weight_update())
            loaded = await self._transfer("check", self._engine.collective_rpc("seal_weights", args=(dict(checksums),)))
            self._num_loaded = int(min(loaded))
        if self._placeholder is not None:
            # A reload makes the workers forget the features of pictures, but not the scheduler, which would rely on
            # them; a group's update makes neither forget features of a trained tower.
            await self._transfer("forget pictures", self._engine.reset_encoder_cache())
        self.policy_version = version
        return self._num_loaded

    async def go_on(self) -> None:
        """Resume the requests after an update. The KV cache gets its memory back: all learners have stopped sending."""
        await self._transfer("go on", self._wake_kv_cache())
        await self._let_go()
        self._updating = None

    async def _transfer(self, phase: str, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except Exception as error:  # vLLM may raise anything
            raise WeightSyncError(
                f"weight update failed in the phase {phase!r}: {type(error).__name__}: {error}"
            ) from error

    async def sleep(self, *, keeps_requests: bool = False, drops_weights: bool = False) -> bool:
        """Free the GPU's memory for the learners until the next weights. Return False on CPU. Idempotent.

        With `drops_weights` the next weights must be an update with the whole model: if that writes all weights of the
        engine, they are not copied to host memory and back.

        With `keeps_requests` requests stop between two tokens, also on a CPU, and continue after the next weights, on a
        GPU with new keys and values (not run on one yet); else wait for their end. WeightSyncError: an earlier update
        never ended.
        """
        sleeps = self._engine.model_config.enable_sleep_mode
        if not sleeps and not keeps_requests:
            return False
        if self._updating is not None:
            raise WeightSyncError("the engine can't sleep: its last weight update never ended")
        if keeps_requests:
            await self._hold()
        if self._is_asleep or not sleeps:
            return self._is_asleep
        await self.pause()
        try:
            # Level 2 drops the weights. With "keep" vLLM preempts the kept requests, which lose their keys and values,
            # and queues them again.
            level = 2 if drops_weights and self._is_sent_whole and not keeps_requests else 1
            await self._engine.sleep(level=level, mode="keep" if keeps_requests else "abort")
            self._load.forgive(self._versions.num_open)
        except Exception as error:  # vLLM may raise anything
            raise EngineDeadError(
                f"the engine could not be put to sleep, so it keeps its GPU memory: {type(error).__name__}: {error}"
            ) from error
        self._is_asleep = True
        return True

    async def wake(self) -> None:
        """Take back the memory that `sleep` freed, with the same weights. Idempotent."""
        await self._wake("weights")
        await self._wake_kv_cache()
        await self._let_go()

    async def _wake(self, what: str) -> None:
        if self._is_asleep:
            await self._engine.wake_up(tags=[what])

    async def _wake_kv_cache(self) -> None:
        if self._is_asleep:
            await self._wake("kv_cache")
            # The engine is awake, so vLLM schedules again without a further call.
            self._is_asleep = self._is_paused = False

    async def pause(self) -> None:
        """Wait until running requests have ended, then schedule nothing until `_resume`."""
        if not self._is_paused:
            await self._engine.pause_generation(mode="wait", clear_cache=False)
            self._is_paused = True

    async def _hold(self) -> None:
        if not self._is_holding:
            await self._changing.acquire()
            self._is_holding = True
            await self._freeze()

    async def _let_go(self) -> None:
        if self._is_holding:
            if self._versions.num_open:
                await self._resume()
            self._is_holding = False
            self._changing.release()

    async def _freeze(self) -> None:
        """Stop all requests between two tokens, and count what the current weights have sampled."""
        if not self._is_paused:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
            self._is_paused = True
        self._versions.close_version(self.policy_version, self._num_sampled)

    def _num_sampled(self, request_id: str) -> int | None:
        """Return the tokens sampled so far; None if vLLM has ended the request."""
        state = self._engine.output_processor.request_states.get(request_id)
        return None if state is None else int(state.detokenizer.num_output_tokens())

    async def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            await self._engine.resume_generation()

    async def check(self) -> None:
        """Raise EngineDeadError if one of the engine's processes does not answer."""
        try:
            await self._engine.check_health()
            await self._engine.collective_rpc("answer")
        except Exception as error:  # vLLM may raise anything
            raise EngineDeadError(
                f"the engine's process does not answer: {plain_error(error)}{self._output.cause()}"
            ) from error

    async def prompt_log_probs(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return log-probs (T-1,) at temperature 1 of each token but the first."""
        from vllm import SamplingParams as VllmSamplingParams

        params = VllmSamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0)
        # Use a new cache salt: vLLM skips the tokens of cached blocks, which would then get no log-probs.
        salt = f"log-probs={time.monotonic_ns()}"
        prompt = {"prompt_token_ids": [int(token) for token in token_ids], "cache_salt": salt}
        await self._resume()
        outputs = self._engine.generate(prompt, params, f"log-probs-{time.monotonic_ns()}", lora_request=self._adapter)
        rows = [output.prompt_logprobs async for output in outputs][-1]
        chosen = [row[token].logprob for row, token in zip(rows[1:], token_ids[1:], strict=True)]
        return np.array(chosen, np.float32)

    async def begin_profile(self) -> None:
        """Profile the engine until `end_profile`, but at most MOST_ITERATIONS of its iterations."""
        await self._engine.start_profile()

    async def end_profile(self, process: str) -> Profile:
        """Return the trace of the engine's first rank, and delete vLLM's files. EngineError: there is none, or it is
        too large."""
        await self._engine.stop_profile()
        folder = Path(self._engine.vllm_config.profiler_config.torch_profiler_dir)
        try:
            trace = await asyncio.to_thread(take_engine_trace, folder)
        except (OSError, ValueError) as error:
            raise EngineError(f"vLLM's profiler left no trace of {process}: {error}") from error
        return Profile(process=process, trace=trace, covers=f"at most {MOST_ITERATIONS} engine iterations")

    async def facts(self) -> dict[str, Any]:
        import vllm

        cache = self._engine.vllm_config.cache_config
        return {
            "vllm": vllm.__version__,
            "async_scheduling": self._engine.vllm_config.scheduler_config.async_scheduling,
            "kv_blocks": cache.num_gpu_blocks,
            "block_tokens": cache.block_size,
            "max_model_tokens": self._engine.model_config.max_model_len,
        }

    def close(self) -> None:
        if folder := self._engine.vllm_config.profiler_config.torch_profiler_dir:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            self._engine.shutdown()
        except psutil.NoSuchProcess:
            # If a process is just ending, vLLM may fail to list its children and leave its sockets open. Garbage
            # collection of the sockets' context would then hang.
            self._engine.engine_core.resources()
            self._engine.shutdown()

    def _engine_error(self, error: Exception, request_id: RequestId) -> EngineError:
        if self._engine.errored:
            cause = self._output.cause()
            return EngineDeadError(
                f"the engine's process died while it served {request_id}: {plain_error(error)}{cause}"
            )
        return EngineError(f"the engine refused {request_id}: {type(error).__name__}: {error}")
