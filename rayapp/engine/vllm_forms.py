"""Reads, for each sampled token, the tokens that a structured output's form (a JSON schema, a regex, ...) allowed.

vLLM's log-probs are of the distribution over the allowed tokens, which it does not return. `FormReader` replays the
sampled tokens through the same grammar, with vLLM's own code, and keeps each distinct mask once.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from rayapp.core.errors import EngineError
from rayapp.core.types import AllowedTokens, Int32Array, RequestId, SamplingParams
from rayapp.engine.vllm_output import vllm_sampling_params

BACKEND = "xgrammar"  # fixed: an engine keeps the library of its first form


class FormReader:
    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._backend: Any = None
        # One thread suffices: xgrammar itself compiles a grammar in several threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")

    async def allowed(self, request_id: RequestId, sampling: SamplingParams, token_ids: Int32Array) -> AllowedTokens:
        """Return the tokens that the form allowed at each sampled token. EngineError: it did not allow one of those."""
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, self._replayed, str(request_id), sampling, token_ids.tolist()
        )
        return await work

    def _replayed(self, request_id: str, sampling: SamplingParams, token_ids: list[int]) -> AllowedTokens:
        grammar = self._grammar(sampling)
        row = self._backend.allocate_token_bitmask(1)
        numbers, mask_of = dict[bytes, int](), np.full(len(token_ids), -1, np.int32)
        for place, token in enumerate(token_ids):
            if grammar.is_terminated():
                break  # after the form's end vLLM allows all tokens
            grammar.fill_bitmask(row, 0)
            mask_of[place] = numbers.setdefault(row.numpy().tobytes(), len(numbers))
            if not grammar.accept_tokens(request_id, [token]):
                raise EngineError(
                    f"{request_id}: token {token}, sampled at position {place}, does not fit the structured output "
                    "that the request asks for"
                )
        masks = np.frombuffer(b"".join(numbers), np.int32).reshape(len(numbers), -1)
        return AllowedTokens(masks=masks, mask_of=mask_of)

    def _grammar(self, sampling: SamplingParams) -> Any:
        from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar
        from vllm.v1.structured_output.request import get_structured_output_key

        params = vllm_sampling_params(sampling, with_seed=False)
        read = self._engine.input_processor
        params.update_from_generation_config(read.generation_config_fields, read.renderer.get_eos_token_id())
        validate_xgrammar_grammar(params)  # this also turns choices into a grammar
        if self._backend is None:
            self._backend = self._opened()
        key = get_structured_output_key(params.structured_outputs)
        return self._backend.compile_grammar(*key, stop_token_ids=params.all_stop_token_ids)

    def _opened(self) -> Any:
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        model = self._engine.model_config
        return XgrammarBackend(
            self._engine.vllm_config,
            tokenizer=cached_tokenizer_from_config(model),
            vocab_size=model.get_vocab_size(),
        )
