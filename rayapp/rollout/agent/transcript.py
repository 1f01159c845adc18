"""The growing token record of one episode: ids, mask and log-probs side by side. Used by the agent loop only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayapp.core.types import BoolArray, Completion, FloatArray, Int32Array


class Transcript:
    """What was read and what was sampled, in order.

    Args:
        prompt_ids: what the policy reads first.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids = list(prompt_ids)
        self.num_prompt_tokens = len(self.ids)
        self._sampled: list[tuple[int, Completion]] = []

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt, tool results included."""
        return len(self.ids) - self.num_prompt_tokens

    def add_sampled(self, completion: Completion) -> tuple[int, int]:
        """Append what the engine sampled; returns where it begins and ends."""
        start = len(self.ids)
        self._sampled.append((start, completion))
        self.ids.extend(completion.token_ids.tolist())
        return start, len(self.ids)

    def add_read(self, token_ids: Sequence[int]) -> None:
        """Append what the policy reads without having sampled it."""
        self.ids.extend(token_ids)

    def arrays(self) -> tuple[Int32Array, BoolArray, FloatArray]:
        """(T,) token ids, (T,) mask, (T,) log-probs."""
        mask = np.zeros(len(self.ids), np.bool_)
        log_probs = np.zeros(len(self.ids), np.float32)
        for start, completion in self._sampled:
            end = start + completion.token_ids.size
            mask[start:end] = True
            log_probs[start:end] = completion.log_probs
        return np.array(self.ids, np.int32), mask, log_probs
