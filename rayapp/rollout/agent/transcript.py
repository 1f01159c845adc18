"""The growing record of one episode: token ids, mask and log-probs side by side, and what the policy said turn by turn.

Used by the agent loop, and by coding tasks, whose episodes have one turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import CallRecord, Completion, ExpertArray, RolloutStatus, SamplingParams, TurnRecord
from rayapp.rollout.agent.episode import Episode, EpisodeEnd

STATUS = {
    EpisodeEnd.ANSWERED: RolloutStatus.COMPLETED,
    EpisodeEnd.MAX_TURNS: RolloutStatus.MAX_TURNS,
    EpisodeEnd.MAX_TOKENS: RolloutStatus.TRUNCATED,
}
"""Of an episode that did not fail."""


class Transcript:
    """What was read and what was sampled, in order.

    Args:
        prompt_ids: what the policy reads first.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.ids = list(prompt_ids)
        self.num_prompt_tokens = len(self.ids)
        self.turns: list[TurnRecord] = []
        self._sampled: list[Completion] = []
        self._experts: list[ExpertArray] = []
        """Of the tokens from the first on, as far as a forward has read them."""

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt, tool results included."""
        return len(self.ids) - self.num_prompt_tokens

    async def sample_turn(
        self,
        engine: RolloutEngine,
        request_id: str,
        sampling: SamplingParams,
        text_of: Callable[[Completion], str],
    ) -> Completion:
        """Let the policy speak once, and record the turn.

        Args:
            text_of: what the turn's record, tools and rewards read of it.
        Raises:
            EngineError: the engine can't generate.
        """
        started_at_s = time.time()
        num_routed = sum(map(len, self._experts))
        completion = await engine.generate(request_id, self.ids, replace(sampling, num_routed=num_routed))
        self._sampled.append(completion)
        if completion.routed_experts is not None:
            self._experts.append(completion.routed_experts)
        self.ids.extend(completion.token_ids.tolist())
        text = text_of(completion)
        self.turns.append(TurnRecord.of(completion, end=len(self.ids), text=text, started_at_s=started_at_s))
        return completion

    def add_calls(self, calls: tuple[CallRecord, ...]) -> None:
        """Record the tool calls of the last turn."""
        self.turns[-1] = replace(self.turns[-1], calls=calls)

    def add_read(self, token_ids: Sequence[int]) -> None:
        """Append what the policy reads without having sampled it."""
        self.ids.extend(token_ids)

    def finished(self, end: EpisodeEnd) -> Episode:
        """The episode, ended by the policy or by a limit."""
        return self._episode(end, STATUS[end], "")

    def failed(self, status: RolloutStatus, failure: str) -> Episode:
        """The episode, ended by something that is not the policy's doing; `failure` says what, to a person."""
        return self._episode(EpisodeEnd.FAILED, status, failure)

    def _episode(self, end: EpisodeEnd, status: RolloutStatus, failure: str) -> Episode:
        mask = np.zeros(len(self.ids), np.bool_)
        log_probs = np.zeros(len(self.ids), np.float32)
        for turn, completion in zip(self.turns, self._sampled, strict=True):
            mask[turn.start : turn.end] = True
            log_probs[turn.start : turn.end] = completion.log_probs
        experts = np.concatenate(self._experts) if self._experts else None
        if experts is not None:  # 0 for the tokens that no forward has read
            experts = np.pad(experts, ((0, len(self.ids) - len(experts)), (0, 0), (0, 0)))
        return Episode(
            token_ids=np.array(self.ids, np.int32),
            response_mask=mask,
            rollout_log_probs=log_probs,
            num_prompt_tokens=self.num_prompt_tokens,
            turns=tuple(self.turns),
            end=end,
            status=status,
            failure=failure,
            routed_experts=experts,
        )
