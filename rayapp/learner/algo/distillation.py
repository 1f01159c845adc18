"""On-policy distillation: the KL between policy and teacher on tokens that the policy sampled.

Forward and reverse KL: arXiv:2306.13649 (GKD), arXiv:2306.08543 (MiniLLM); the log-ratio of a sampled token as its
advantage: Thinking Machines' "On-Policy Distillation" (2025). `VerdictReader` puts the verdict on an answer before the
teacher's prompt: arXiv:2601.20802 (SDPO), where the policy is its own teacher.
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
from rayapp.storage.media import moved

if TYPE_CHECKING:
    from torch import Tensor


LARGEST_LOG_RATIO = 20.0  # of the log-ratios that the forward KL exponentiates
_LOG_OF_NOTHING = -87.0  # about the smallest probability in float32


def teacher_advantages(teacher: Tensor, old: Tensor, section: DistillationSection) -> Tensor:
    """Return advantages with which a policy gradient lowers the KL to the teacher, without gradient.

    Reverse KL: log q - log p; forward KL: q / p - 1, the gradient of the k3 estimator; times the section's weight.
    `teacher` and `old` are log-probs of the sampled tokens.
    """
    log_ratio = (teacher - old).detach()
    limit = section.max_log_ratio
    if section.kl == "reverse":
        return section.weight * (log_ratio if limit is None else log_ratio.clamp(-limit, limit))
    limit = limit or LARGEST_LOG_RATIO
    return section.weight * log_ratio.clamp(-limit, limit).expm1()


def kl(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """Return the KL at each of C positions, (C,), from log-probs (C, V)."""
    log_q = _told_apart(log_p, log_q, section)
    above, below = (log_p, log_q) if section.kl == "reverse" else (log_q, log_p)
    return (above.exp() * (above - below)).sum(-1)


def kl_gradient(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """Return the gradient of `kl` for the policy's logits, (C, V). Reverse: p (log p - log q - KL); forward: p - q."""
    log_q = _told_apart(log_p, log_q, section)
    if section.kl == "forward":
        return log_p.exp() - log_q.exp()
    p, log_ratio = log_p.exp(), log_p - log_q
    return (log_ratio - (p * log_ratio).sum(-1, keepdim=True)).mul_(p)


def _told_apart(log_p: Tensor, log_q: Tensor, section: DistillationSection) -> Tensor:
    """Return the teacher's log-probs to compare: with `kl_over: top_k` all other tokens are one outcome, with a
    probability spread in proportion to the policy's."""
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
    """Puts the verdict on an answer, cut to `max_tokens`, before the prompt that the teacher reads."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def beside(self, item: TrainItem) -> TrainItem:
        """Return the item with its verdict as a message before the prompt; the response tokens stay."""
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
                media=moved(trajectory.media, size),
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
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def served_log_probs(items: Sequence[TrainItem], section: DistillationSection, num_ranks: int) -> dict[int, FloatArray]:
    """Return log-probs (R,) of response tokens under a teacher on a server, by row. LearnerError: no answer, or a
    trajectory has pictures."""
    if any(item.trajectory.media for item in items):
        raise LearnerError(
            "distillation.base_url: a teacher on a server can't score pictures. Set distillation.teacher to a model "
            "folder, without base_url."
        )
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
    """Return log-probs (R,), with a request for each branch with trained tokens."""
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
    """Return the tokens' log-probs (T,); 0 for the first."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(tokens[1:], entries[1:], strict=True)
        return np.array([0.0, *(float(entry[str(token)]["logprob"]) for token, entry in pairs)], np.float32)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise LearnerError(
            "distillation.base_url: the server's answers don't have prompt_logprobs for every token "
            f"({type(error).__name__}: {error}). Use a vLLM server (vllm serve MODEL)."
        ) from error
