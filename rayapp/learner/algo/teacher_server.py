"""A teacher on a vLLM server that somebody else runs: its log-probs of sampled tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from rayapp.config.distillation import DistillationSection
from rayapp.core.errors import LearnerError
from rayapp.core.types import FloatArray
from rayapp.learner.batch import TrainItem, trained_branches
from rayapp.tasks.custom_rewards import RewardFailedError
from rayapp.tasks.judges.client import EndpointClient


def served_log_probs(items: Sequence[TrainItem], section: DistillationSection, num_ranks: int) -> dict[int, FloatArray]:
    """(R,) log-probs of each trajectory's response tokens under the teacher, by row.

    Args:
        num_ranks: learners that ask at the same time.
    Raises:
        LearnerError: the server does not answer, or not with log-probs.
    """
    try:
        return asyncio.run(_all(items, section, num_ranks))
    except RewardFailedError as error:
        raise LearnerError(
            f"distillation.base_url: {error}. Start the server again, and then this command: the run goes on from its "
            "last checkpoint."
        ) from error


async def _all(items: Sequence[TrainItem], section: DistillationSection, num_ranks: int) -> dict[int, FloatArray]:
    client = EndpointClient(section.endpoint, num_sharing=num_ranks)
    try:
        found = await asyncio.gather(*(_scored(item, section, client) for item in items))
    finally:
        await client.close()
    return {item.row: log_probs for item, log_probs in zip(items, found, strict=True)}


async def _scored(item: TrainItem, section: DistillationSection, client: EndpointClient) -> FloatArray:
    """Of a tree, one request for each branch that trains something."""
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
    """(T,) of each token after those before it; 0 for the first, which nothing comes before."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(tokens[1:], entries[1:], strict=True)
        return np.array([0.0, *(float(entry[str(token)]["logprob"]) for token, entry in pairs)], np.float32)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise LearnerError(
            "distillation.base_url: its answers hold no prompt_logprobs of every token "
            f"({type(error).__name__}: {error}). It must be a vLLM server (vllm serve MODEL)."
        ) from error
