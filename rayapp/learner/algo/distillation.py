"""On-policy distillation: the KL between policy and teacher on tokens that the policy sampled.

If the loss needs the whole distribution, `log_probs` calls `kl` for a chunk of positions at a time. If it needs only
the sampled tokens, the step calls `teacher_advantages`. Forward and reverse KL: arXiv:2306.13649 (GKD); reverse KL:
arXiv:2306.08543 (MiniLLM). Thinking Machines' "On-Policy Distillation" (2025) uses the log-ratio of a sampled token as
its advantage, without a discount. This module doesn't use the model itself.

`VerdictReader` puts the verdict on an answer before the prompt that the teacher reads. The response's tokens stay the
same, so the difference of a token's two log-probs is negative if the verdict makes the token less likely:
self-distillation with feedback, as in arXiv:2601.20802 (SDPO), where the policy is its own teacher.

`served_log_probs` requests log-probs from a teacher on a vLLM server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rayapp.config.other_models import DistillationSection
from rayapp.core.errors import LearnerError, RewardFailedError
from rayapp.core.http import EndpointClient
from rayapp.core.types import FloatArray, Fork, Int32Array, Reward
from rayapp.learner.batch import TrainItem, trained_branches

if TYPE_CHECKING:
    from torch import Tensor


LARGEST_LOG_RATIO = 20.0
"""Limit of the log-ratios in the forward KL, which are exponentiated, if the config sets no limit."""
_LOG_OF_NOTHING = -87.0
"""Lower limit of an outcome's log-prob: its probability is about the smallest in float32."""


def teacher_advantages(teacher: Tensor, old: Tensor, section: DistillationSection) -> Tensor:
    """Return advantages with which a policy gradient lowers the KL to the teacher, in expectation over the sampled
    tokens.

    Args:
        teacher, old: log-probs of the sampled tokens, under the teacher and under the policy at the start of the step.
    Returns:
        For the reverse KL: log q - log p. For the forward KL: q / p - 1, which gives the gradient of the k3 estimator.
        Both are multiplied by the section's weight and carry no gradient.
    """
    log_ratio = (teacher - old).detach()
    limit = section.max_log_ratio
    if section.kl == "reverse":
        return section.weight * (log_ratio if limit is None else log_ratio.clamp(-limit, limit))
    limit = limit or LARGEST_LOG_RATIO
    return section.weight * log_ratio.clamp(-limit, limit).expm1()


def kl(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """Return the KL between policy and teacher at each of C positions, (C,).

    Args:
        log_p, log_q: log-probs (C, V) of the policy and of the teacher.
    """
    log_q = _told_apart(log_p, log_q, section)
    above, below = (log_p, log_q) if section.kl == "reverse" else (log_q, log_p)
    return (above.exp() * (above - below)).sum(-1)


def kl_gradient(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """Return the gradient of `kl` with respect to the policy's logits, (C, V). Reverse KL: p (log p - log q - KL);
    forward KL: p - q.
    """
    log_q = _told_apart(log_p, log_q, section)
    if section.kl == "forward":
        return log_p.exp() - log_q.exp()
    p, log_ratio = log_p.exp(), log_p - log_q
    return (log_ratio - (p * log_ratio).sum(-1, keepdim=True)).mul_(p)


def _told_apart(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """Return the teacher's log-probs (C, V) that `kl` compares with the policy's. With `kl_over: top_k` all tokens
    outside the top k count as one outcome: the teacher's probability of that outcome is distributed over its tokens in
    proportion to the policy's probabilities.
    """
    if section.kl_over != "top_k" or section.top_k >= log_p.shape[-1]:
        return log_q
    top = (log_p if section.kl == "reverse" else log_q).topk(section.top_k, dim=-1).indices
    rest_p, rest_q = (
        log.scatter(-1, top, float("-inf")).logsumexp(-1, keepdim=True).clamp_min(_LOG_OF_NOTHING)
        for log in (log_p, log_q)
    )
    return (log_p + (rest_q - rest_p)).scatter(-1, top, log_q.gather(-1, top))


_TEXT = "An answer to the task that follows was judged: {status}, reward {value:g}. {detail}"


class VerdictReader:
    """Puts the verdict on an answer before the prompt that the teacher reads.

    Args:
        tokenizer: tokenizer of the policy, from transformers.
        max_tokens: maximum length of the message; a longer verdict is cut.
    """

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def beside(self, item: TrainItem) -> TrainItem:
        """Return the item with its verdict as a message before the prompt; the response tokens stay the same."""
        message, trajectory = self._message(item.trajectory.reward), item.trajectory
        size, nothing = message.size, np.zeros(message.size)
        return replace(
            item,
            trajectory=replace(
                trajectory,
                token_ids=np.concatenate([message, trajectory.token_ids]),
                response_mask=np.concatenate([nothing.astype(np.bool_), trajectory.response_mask]),
                rollout_log_probs=np.concatenate([nothing.astype(np.float32), trajectory.rollout_log_probs]),
                routed_experts=None,  # the server has chosen no experts for this longer prompt
                # A fork with after=-1 begins a new conversation, which must also begin with the message.
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
        """Return the token ids of the text as a user's message. Without a chat template, return the token ids of the
        text alone.
        """
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def served_log_probs(items: Sequence[TrainItem], section: DistillationSection, num_ranks: int) -> dict[int, FloatArray]:
    """Return log-probs (R,) of each trajectory's response tokens under a teacher on a server, by row.

    Args:
        num_ranks: number of learners that call the server at the same time.
    Raises:
        LearnerError: the server does not answer, or its answer has no log-probs.
    """
    try:
        return asyncio.run(_all(items, section, num_ranks))
    except RewardFailedError as error:
        raise LearnerError(
            f"distillation.base_url: {error}. Start the server again, and then this command: the run continues from "
            "its last checkpoint."
        ) from error


async def _all(items: Sequence[TrainItem], section: DistillationSection, num_ranks: int) -> dict[int, FloatArray]:
    client = EndpointClient(section.endpoint, num_sharing=num_ranks)
    try:
        found = await asyncio.gather(*(_scored(item, section, client) for item in items))
    finally:
        await client.close()
    return {item.row: log_probs for item, log_probs in zip(items, found, strict=True)}


async def _scored(item: TrainItem, section: DistillationSection, client: EndpointClient) -> FloatArray:
    """Return the log-probs (R,) of one item. Each branch of the trajectory with trained tokens takes one request."""
    trajectory = item.trajectory
    log_probs = np.zeros(trajectory.num_tokens, np.float32)
    for path, responses in trained_branches(trajectory):
        tokens = trajectory.token_ids[path[: responses[-1] + 1]].tolist()
        body = {"model": section.teacher, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await client.post(f"{section.base_url}/completions", body)
        log_probs[path[responses]] = _of_tokens(answer, tokens)[responses]
    found: FloatArray = log_probs[trajectory.response_mask]
    return found


def _of_tokens(answer: dict[str, Any], tokens: Sequence[int]) -> FloatArray:
    """Return the log-probs (T,) of the tokens, each given the tokens before it; 0 for the first token."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(tokens[1:], entries[1:], strict=True)
        return np.array([0.0, *(float(entry[str(token)]["logprob"]) for token, entry in pairs)], np.float32)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise LearnerError(
            "distillation.base_url: the server's answers don't have prompt_logprobs for every token "
            f"({type(error).__name__}: {error}). Use a vLLM server (vllm serve MODEL)."
        ) from error
