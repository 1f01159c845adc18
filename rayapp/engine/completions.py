"""Converts sampling parameters to vLLM's and its outputs to completions, with the policy version of each token.

At a weight sync an engine freezes its requests, takes the new weights, and goes on from the same tokens.
`TokenVersions` counts, for every request in flight, the tokens that each version has sampled. Used by `VllmEngine`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rayapp.core.errors import EngineError
from rayapp.core.types import Completion, FloatArray, Int32Array, RequestId, SamplingParams, VersionSpan


class TokenVersions:
    """See the module. A request's id may be any text that is unique among requests in flight."""

    def __init__(self) -> None:
        self._spans: dict[str, list[VersionSpan]] = {}
        self._ended_by: dict[str, int] = {}
        """Version of the last token of each request that ended and whose output was not fetched yet."""

    def begin(self, request_id: str) -> None:
        """Begin to follow a request, whose tokens are counted at every update from now on."""
        self._spans[request_id] = []

    @property
    def num_open(self) -> int:
        return len(self._spans)

    def close_version(self, version: int, num_tokens: Callable[[str], int | None]) -> None:
        """Count all tokens sampled since the last call for `version`. Called while the engine is frozen.

        Args:
            num_tokens: request id -> tokens sampled since its start; None if it has ended.
        """
        for request_id, spans in self._spans.items():
            count = num_tokens(request_id)
            if count is None:
                self._ended_by.setdefault(request_id, version)
            else:
                self._add(spans, version, count)

    def end(self, request_id: str, version: int, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Return the spans of a request's tokens, oldest version first; `version` sampled the uncounted ones."""
        spans = self._spans.pop(request_id)
        self._add(spans, self._ended_by.pop(request_id, version), num_tokens)
        return tuple(spans)

    def forget(self, request_id: str) -> None:
        """Stop following a request that failed or was cancelled. Idempotent."""
        self._spans.pop(request_id, None)
        self._ended_by.pop(request_id, None)

    @staticmethod
    def _add(spans: list[VersionSpan], version: int, num_tokens: int) -> None:
        new = num_tokens - sum(span.num_tokens for span in spans)
        assert new >= 0, f"{num_tokens} tokens after {spans}"
        if new:
            spans.append(VersionSpan(policy_version=version, num_tokens=new))


def vllm_sampling_params(sampling: SamplingParams, *, with_seed: bool) -> Any:
    """Return vLLM's `SamplingParams` for completions with the log-prob of each token.

    Args:
        with_seed: give the request its own seed; see `rayapp.engine.vllm`.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    form = dict(sampling.structured_outputs)
    return VllmSamplingParams(
        **sampling.options,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed if with_seed else None,
        stop=list(sampling.stop),
        routed_experts_prompt_start=sampling.num_routed,
        logprobs=sampling.num_top_log_probs,
        flat_logprobs=True,
        output_kind=RequestOutputKind.CUMULATIVE if sampling.is_streamed else RequestOutputKind.FINAL_ONLY,
        structured_outputs=StructuredOutputsParams(**form) if form else None,
    )


def whole_completion(
    request_id: RequestId,
    output: Any,
    spans: tuple[VersionSpan, ...],
    policy_version: int,
    queued_s: float,
    generate_s: float,
    num_routed: int | None = None,
) -> Completion:
    """Return the `Completion` of an output that ended by the policy's stop token or by the limit of tokens.

    Args:
        num_routed: number of tokens whose experts it must have; None: without experts.
    Raises:
        EngineError: the engine ended it early (abort, error, repetition), so it must not be scored or trained on.
    """
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"vLLM ended {request_id} early, after {len(output.token_ids)} tokens (finish reason "
            f"{output.finish_reason})"
        )
    token_ids = np.array(output.token_ids, np.int32)
    log_probs, top_ids, top_log_probs = _log_probs(output.logprobs, token_ids.size)
    experts = None if num_routed is None else output.routed_experts
    if num_routed is not None and (experts is None or len(experts) != num_routed):
        found = 0 if experts is None else len(experts)
        raise EngineError(f"vLLM was to return the experts of {num_routed} tokens of {request_id}, not of {found}")
    return Completion(
        token_ids=token_ids,
        log_probs=log_probs,
        text=output.text,
        finish_reason=output.finish_reason,
        policy_version=spans[0].policy_version if spans else policy_version,
        version_spans=spans if len(spans) > 1 else (),
        routed_experts=experts,
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        time_queued_s=queued_s,
        time_generate_s=generate_s,
    )


def _log_probs(flat: Any, num_tokens: int) -> tuple[FloatArray, Int32Array | None, FloatArray | None]:
    """Return the log-prob of each sampled token, and the ids and log-probs of the likeliest tokens, None if unwanted.

    Args:
        flat: vLLM's FlatLogprobs: rows of the sampled token and the k likeliest.
    """
    values = np.array(flat.logprobs, np.float32)
    if num_tokens == 0 or values.size % num_tokens or values.size < num_tokens:
        raise EngineError(f"vLLM gave {values.size} log-probs for {num_tokens} sampled tokens")
    rows = values.reshape(num_tokens, -1)
    if rows.shape[1] == 1:
        return values, None, None
    return rows[:, 0].copy(), np.array(flat.token_ids, np.int32).reshape(rows.shape)[:, 1:], rows[:, 1:]
