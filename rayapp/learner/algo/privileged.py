"""What the teacher reads and the policy did not: how its answer was judged, as a message before the prompt.

The response's tokens stay the same, so that the two log-probs of each tell which of them the verdict speaks against:
self-distillation with feedback, as in arXiv:2601.20802 (SDPO), where the policy is its own teacher.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rayapp.core.types import Fork, Int32Array, Reward
from rayapp.learner.batch import TrainItem

_TEXT = "An answer to the task that follows was judged: {status}, reward {value:g}. {detail}"


class VerdictReader:
    """Puts verdicts before prompts.

    Args:
        tokenizer: Hugging Face's, of the policy.
        max_tokens: of a message; a longer verdict is cut.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def beside(self, item: TrainItem) -> TrainItem:
        """The same response tokens, read after their verdict."""
        message, trajectory = self._message(item.trajectory.reward), item.trajectory
        size, nothing = message.size, np.zeros(message.size)
        return replace(
            item,
            trajectory=replace(
                trajectory,
                token_ids=np.concatenate([message, trajectory.token_ids]),
                response_mask=np.concatenate([nothing.astype(np.bool_), trajectory.response_mask]),
                rollout_log_probs=np.concatenate([nothing.astype(np.float32), trajectory.rollout_log_probs]),
                routed_experts=None,  # nobody has sampled after the message
                # A conversation of its own, after -1, goes on from the message too.
                forks=tuple(Fork(start=fork.start + size, after=fork.after + size) for fork in trajectory.forks),
            ),
        )

    def _message(self, reward: Reward) -> Int32Array:
        text = _TEXT.format(status=reward.status, value=reward.value, detail=reward.detail)
        room = self._max_tokens - len(self._rendered(""))
        words = self._tokenizer.encode(text, add_special_tokens=False)
        if len(words) > room:
            text = self._tokenizer.decode(words[: max(0, room)])
        return np.array(self._rendered(text)[: self._max_tokens], np.int32)

    def _rendered(self, text: str) -> list[int]:
        """As a message of the policy's chat template; as it is where it has none."""
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
