"""An engine that has no model and returns scripted completions, for tests and benchmarks of tasks, tools and loops.

ScriptedEngine(tokenizer, lambda request_id, prompt_ids: "text of this turn")
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from rayapp.core.errors import EngineError
from rayapp.core.protocols import OnTokens
from rayapp.core.types import Completion, RequestId, SamplingParams

Script = Callable[[RequestId, Sequence[int]], str | Sequence[int]]
"""Function of request id and prompt ids that returns a turn. A text is tokenized, and ended with the end token; token
ids are used unchanged."""


class ScriptedEngine:
    """A `rayapp.core.protocols.RolloutEngine` with scripted completions.

    `script` returns each turn, or raises; texts are encoded (without special tokens) and get `end_id`. A call takes
    `latency_s`, and `token_s` for each token of a streamed one. Longer requests than `max_model_tokens` (prompt and
    completion) are refused.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        script: Script,
        *,
        end_id: int,
        latency_s: float = 0.0,
        token_s: float = 0.0,
        policy_version: int = 0,
        max_model_tokens: int = 1 << 20,
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._script = script
        self._end_id = end_id
        self._latency_s, self._token_s = latency_s, token_s
        self._max_model_tokens = max_model_tokens
        self.policy_version = policy_version
        self.requests: list[tuple[RequestId, tuple[int, ...], SamplingParams]] = []
        """Every call so far, if `record` is True."""
        self.record = False

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Return the script's turn, cut to `sampling.max_tokens`. The token at index i has the log-prob -0.5 - i /
        1000. The likeliest tokens are reported as 0, 1, 2 …, with the log-probs -1, -2, -3 …
        """
        await asyncio.sleep(self._latency_s)
        if self.record:
            self.requests.append((request_id, tuple(prompt_ids), sampling))
        if len(prompt_ids) >= self._max_model_tokens:
            raise EngineError(
                f"{request_id}: the prompt has {len(prompt_ids)} tokens: it must have fewer than "
                f"{self._max_model_tokens}"
            )
        if sampling.max_tokens < 1:
            raise EngineError(f"{request_id}: max_tokens is {sampling.max_tokens}: it must be at least 1")
        said = self._script(request_id, prompt_ids)
        token_ids = [*self._encode(said), self._end_id] if isinstance(said, str) else list(said)
        is_cut = len(token_ids) > sampling.max_tokens
        token_ids = token_ids[: sampling.max_tokens]
        if on_tokens is not None:
            await self._stream(token_ids, on_tokens)
        return Completion(
            token_ids=np.array(token_ids, np.int32),
            log_probs=(-0.5 - np.arange(len(token_ids)) / 1000).astype(np.float32),
            text=said if isinstance(said, str) and not is_cut else self._decode(token_ids),
            finish_reason="length" if is_cut else "stop",
            policy_version=self.policy_version,
            time_generate_s=self._latency_s,
        )

    async def _stream(self, token_ids: Sequence[int], on_tokens: OnTokens) -> None:
        for token_id in token_ids:
            await asyncio.sleep(self._token_s)
            on_tokens([token_id])
