"""Sampling in vLLM's terms and back: our `SamplingParams` as vLLM's, vLLM's output as our `Completion`."""

from __future__ import annotations

from typing import Any

import numpy as np

from rayapp.core.errors import EngineError
from rayapp.core.types import Completion, SamplingParams, VersionSpan


def vllm_sampling_params(sampling: SamplingParams, *, with_seed: bool) -> Any:
    """vLLM's `SamplingParams`: whole completions only, each token with its own log-prob.

    Args:
        with_seed: the request brings its own seed; see `rayapp.engine.vllm`.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed if with_seed else None,
        stop=list(sampling.stop),
        routed_experts_prompt_start=sampling.num_routed,
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
    num_routed: int | None = None,
) -> Completion:
    """The `Completion` of an output that the policy itself ended, or the limit of tokens did.

    Args:
        num_routed: tokens whose experts it is to bring; None: nobody asks for them.
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
        time_queued_s=queued_s,
        time_generate_s=generate_s,
    )
