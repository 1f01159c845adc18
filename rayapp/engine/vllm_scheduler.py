"""vLLM's scheduler, but whole completions leave the engine core in parts of many tokens.

vLLM 0.30 sends each token when it is sampled, also of requests whose caller reads only the end: per step and request a
message of the token and three arrays for its log-prob. The engine core encodes them while it should prepare the GPU's
next step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

EVERY_S = 0.1  # between two parts: the server's process unpacks one while the next is sampled


def make_scheduler(vllm_config: Any, **arguments: Any) -> Scheduler:
    """Make the scheduler that vLLM would choose, with parts. vLLM finds this function by its name, `scheduler_cls`."""
    kind = _AsyncInParts if vllm_config.scheduler_config.async_scheduling else _InParts
    return kind(vllm_config=vllm_config, **arguments)


class _Parts:
    """Mixin of vLLM's schedulers that holds back tokens until the end of their request, a pause, or `EVERY_S`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._held: dict[str, list[EngineCoreOutput]] = {}  # by request id, of unfinished requests
        self._sent_at_s = time.monotonic()

    def update_from_output(self: Any, scheduler_output: Any, model_output: Any) -> dict[int, EngineCoreOutputs]:
        made: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_output)  # type: ignore[misc]
        for outputs in made.values():
            outputs.outputs = [self._with_held(output) for output in outputs.outputs if not self._holds(output)]
        now_s = time.monotonic()
        if self._held and (self._is_frozen or now_s - self._sent_at_s >= EVERY_S):
            for request_id, held in self._held.items():
                client = self.requests[request_id].client_index
                made.setdefault(client, EngineCoreOutputs()).outputs.append(_joined(held))
            self._held, self._sent_at_s = {}, now_s
        return made

    def _holds(self: Any, output: EngineCoreOutput) -> bool:
        """Hold back an output if it has nothing but tokens for a caller that waits for the end."""
        if (
            output.finish_reason is not None
            or output.events is not None
            or output.prefill_stats is not None
            or output.routed_experts is not None
            or output.new_sampling_mask is not None
            or output.new_prompt_logprobs_tensors is not None
        ):
            return False
        if (held := self._held.get(output.request_id)) is None:
            params = self.requests[output.request_id].sampling_params
            # The server's process looks for stop texts.
            if params is None or params.stop or params.output_kind != RequestOutputKind.FINAL_ONLY:
                return False
            self._held[output.request_id] = held = []
        held.append(output)
        return True

    def _with_held(self, output: EngineCoreOutput) -> EngineCoreOutput:
        held = self._held.pop(output.request_id, None)
        return output if held is None else _joined([*held, output])

    def finish_requests(self: Any, request_ids: Any, finished_status: Any) -> list[Any]:
        ended: list[Any] = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self._held.pop(request.request_id, None)
        return ended

    def has_finished_requests(self: Any) -> bool:
        # vLLM then makes one more step, without tokens, and confirms the pause behind its outputs.
        is_held = self._is_frozen and self._held
        return bool(is_held or super().has_finished_requests())  # type: ignore[misc]

    @property
    def _is_frozen(self: Any) -> bool:
        return bool(self.pause_state == PauseState.PAUSED_ALL)


class _InParts(_Parts, Scheduler):  # type: ignore[misc]
    pass


class _AsyncInParts(_Parts, AsyncScheduler):  # type: ignore[misc]
    pass


def _joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the last output with the tokens and log-probs of all."""
    tokens = [token for output in outputs for token in output.new_token_ids]
    lists = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    logprobs = LogprobsLists(*map(np.concatenate, list(zip(*lists, strict=True))[:3])) if lists else None
    return replace(outputs[-1], new_token_ids=tokens, new_logprobs=logprobs)
