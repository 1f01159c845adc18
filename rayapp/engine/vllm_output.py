"""Reads what vLLM puts out: completions, the cause of a failure in the log, and the load in the statistics.

vLLM's exceptions say "see root cause above": another process logs the cause to the standard output that it shares with
the server. vLLM calls `EngineLoad` by names of methods, so vLLM is not imported.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rayapp.core.errors import EngineError
from rayapp.core.protocols import OnTokens
from rayapp.core.types import Completion, FloatArray, RequestId, SamplingParams, VersionSpan

_PROCESS = rb"^\((?:EngineCore|Worker)[^)]*\) ERROR [^\]]*\] "
# Last line of a traceback, the only one that is not indented.
_CAUSE = re.compile(_PROCESS + rb"([A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)", re.MULTILINE)
_CACHE = re.compile(r"\bkv\b|\bcache\b", re.IGNORECASE)
_MOST_READ = 1 << 20
_MOST_CHARS = 500


class EngineOutput:
    """Output that this process and its children write to a descriptor from now on; unknown if it is not a file."""

    def __init__(self, descriptor: int = 1) -> None:
        self._path = Path(f"/proc/self/fd/{descriptor}")
        self._start = _size(self._path)

    def cause(self) -> str:
        """Return `, because ` and the first exception that the engine logged; else empty."""
        found = _CAUSE.search(self._text())
        return _because(found[1]) if found else ""

    def last_line(self) -> str:
        """Return `, because ` and the last line, which mostly has a failing program's reason."""
        lines = self._text().split(b"\n")
        return next((_because(line) for line in reversed(lines) if line.strip()), "")

    def _text(self) -> bytes:
        if self._start is None:
            return b""
        with self._path.open("rb") as output:
            output.seek(self._start)
            return output.read(_MOST_READ)


def way_out(why: str) -> str:
    """Return advice if vLLM reports that its KV cache is too small or too large; else empty."""
    return (
        " Set the KV cache's size: server.kv_cache_gib, or on a GPU server.gpu_memory_utilization."
        if _CACHE.search(why)
        else ""
    )


def _because(line: bytes) -> str:
    return f", because {line.decode(errors='replace')[:_MOST_CHARS]}"


def _size(path: Path) -> int | None:
    """Return the file's size; None for a pipe or a terminal."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


class EngineLoad:
    """Stat logger of an engine, which keeps the last numbers. `on_step` gets the share of the KV cache in use after
    each step; `on_tokens` is called after steps that sampled tokens."""

    def __init__(
        self,
        on_step: Callable[[float], None] = lambda kv_used: None,
        on_tokens: Callable[[], None] = lambda: None,
    ) -> None:
        self._running = self._waiting = 0
        self._kv_used = 0.0
        self._prefix_queries = self._prefix_hits = self._preempted = self._forgiven = 0
        self._on_step = on_step
        self._on_tokens = on_tokens

    def factory(self, vllm_config: Any, engine_index: int = 0) -> EngineLoad:
        """Return this logger whenever vLLM requests one."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        num_preempted = 0 if iteration_stats is None else iteration_stats.num_preempted_reqs
        forgiven = min(self._forgiven, num_preempted)
        self._forgiven -= forgiven
        self._preempted += num_preempted - forgiven
        if iteration_stats is not None and iteration_stats.num_generation_tokens:
            self._on_tokens()
        if scheduler_stats is None:
            return
        self._running = scheduler_stats.num_running_reqs
        self._waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self._kv_used = scheduler_stats.kv_cache_usage
        self._prefix_queries += scheduler_stats.prefix_cache_stats.queries
        self._prefix_hits += scheduler_stats.prefix_cache_stats.hits
        self._on_step(self._kv_used)

    def forgive(self, num_requests: int) -> None:
        """Ignore the next preemptions, which are due to sleep."""
        self._forgiven = num_requests

    def log_engine_initialized(self) -> None:
        """Do nothing; vLLM requires the method."""

    def log(self) -> None:
        """Do nothing: the numbers are read with `scalars`."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing; vLLM requires the method."""

    def scalars(self) -> dict[str, float]:
        """Return running and waiting requests, the share of the KV cache in use, and counts since the start: tokens
        looked up and found in the prefix cache, and preempted sequences."""
        return {
            "running": float(self._running),
            "waiting": float(self._waiting),
            "kv_used": float(self._kv_used),
            "prefix_queries": float(self._prefix_queries),
            "prefix_hits": float(self._prefix_hits),
            "preempted": float(self._preempted),
        }


class TokenVersions:
    """Counts, for each request in flight, the tokens that each policy version sampled."""

    def __init__(self) -> None:
        self._spans: dict[str, list[VersionSpan]] = {}
        # Version of the last token of ended requests whose output is not fetched yet.
        self._ended_by: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        self._spans[request_id] = []

    @property
    def num_open(self) -> int:
        return len(self._spans)

    def close_version(self, version: int, num_tokens: Callable[[str], int | None]) -> None:
        """Count tokens since the last call as sampled by `version`, while the engine is frozen. `num_tokens` is None
        for a request that has ended."""
        for request_id, spans in self._spans.items():
            count = num_tokens(request_id)
            if count is None:
                self._ended_by.setdefault(request_id, version)
            else:
                self._add(spans, version, count)

    def end(self, request_id: str, version: int, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Return the spans of a request's tokens, oldest first; the rest were sampled by `version`."""
        spans = self._spans.pop(request_id)
        self._add(spans, self._ended_by.pop(request_id, version), num_tokens)
        return tuple(spans)

    def forget(self, request_id: str) -> None:
        """Stop counting a request that failed or was cancelled. Idempotent."""
        self._spans.pop(request_id, None)
        self._ended_by.pop(request_id, None)

    @staticmethod
    def _add(spans: list[VersionSpan], version: int, num_tokens: int) -> None:
        new = num_tokens - sum(span.num_tokens for span in spans)
        assert new >= 0, f"{num_tokens} tokens after {spans}"
        if new:
            spans.append(VersionSpan(policy_version=version, num_tokens=new))


def vllm_sampling_params(sampling: SamplingParams, *, with_seed: bool, with_text: bool = True) -> Any:
    """Return vLLM's `SamplingParams` for whole completions with log-probs; `with_seed` for the second model runner.
    Without text (see `text_of`) vLLM's front end takes half the time, as it decodes each log-prob's token as well."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    form = dict(sampling.structured_outputs)
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
        detokenize=with_text,
        output_kind=RequestOutputKind.CUMULATIVE if sampling.is_streamed else RequestOutputKind.FINAL_ONLY,
        structured_outputs=StructuredOutputsParams(**form) if form else None,
    )


def text_of(tokenizer: Tokenizer, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of sampled tokens as vLLM writes it: without special tokens, and without the beginning of a
    character that was not sampled whole."""
    ids = list(prompt_ids)  # a first token may begin with a blank that only the text before it shows
    text: str | None = DecodeStream(ids=ids, skip_special_tokens=True).step(tokenizer, list(token_ids))
    if text is not None:
        return text
    stream = DecodeStream(ids=ids, skip_special_tokens=True)
    return "".join(stream.step(tokenizer, token) or "" for token in token_ids)


def whole_completion(
    request_id: RequestId,
    output: Any,
    spans: tuple[VersionSpan, ...],
    policy_version: int,
    queued_s: float,
    generate_s: float,
    num_routed: int | None = None,
) -> Completion:
    """Return the `Completion` of an output that ended by the policy's stop token or by the limit of tokens;
    `num_routed` tokens must have their experts. EngineError: the engine ended it early, so it must not be scored or
    trained on."""
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"{request_id}: vLLM ended the request early, after {len(output.token_ids)} tokens (finish reason "
            f"{output.finish_reason})"
        )
    token_ids = np.array(output.token_ids, np.int32)
    experts = None if num_routed is None else output.routed_experts
    if num_routed is not None and (experts is None or len(experts) != num_routed):
        found = 0 if experts is None else len(experts)
        raise EngineError(
            f"{request_id}: vLLM returned the chosen experts for {found} tokens, but router replay needs them for "
            f"{num_routed} tokens"
        )
    return Completion(
        token_ids=token_ids,
        log_probs=_log_probs(output.logprobs, token_ids.size),
        text=output.text,
        finish_reason=output.finish_reason,
        policy_version=spans[0].policy_version if spans else policy_version,
        version_spans=spans if len(spans) > 1 else (),
        routed_experts=experts,
        time_queued_s=queued_s,
        time_generate_s=generate_s,
    )


def _log_probs(flat: Any, num_tokens: int) -> FloatArray:
    values = np.array(flat.logprobs, np.float32)
    if num_tokens == 0 or values.size != num_tokens:
        raise EngineError(f"vLLM returned {values.size} log-probs for {num_tokens} sampled tokens: each needs one")
    return values


async def last_output(queue: Any, on_tokens: OnTokens | None) -> Any:
    """Return a request's last RequestOutput; before that, report the new tokens of each."""
    num_told = 0
    while not (whole := await queue.get()).finished:
        token_ids = whole.outputs[0].token_ids
        if on_tokens is not None and len(token_ids) > num_told:
            on_tokens(list(token_ids[num_told:]))
            num_told = len(token_ids)
    return whole


def plain_error(error: Exception) -> str:
    """Return the error in one line, without vLLM's pointer to a traceback."""
    text = str(error).replace("See stack trace (above) for the root cause.", "").strip()
    return f"{type(error).__name__}: {text}"
