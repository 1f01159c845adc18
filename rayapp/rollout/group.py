"""One group from prompt to verdicts: G episodes side by side, each scored the moment it ends.

    Assignment(prompt, play, score) --G times: play -> Episode, score -> Reward--> Trajectory --> Group, GroupSummary

Called by the rollout worker; needs no Ray. A coding task and a data row differ only in their `Assignment`. A trajectory
that fails for reasons that are not the policy's is data with an ERROR_* status, never an exception, so one bad sandbox
can't take its group along. Mistakes of the configuration are raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rayapp.core.aio import side_by_side
from rayapp.core.errors import DeadlineError, EngineDeadError, EngineError, StaleVersionError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.summaries import summarize_group
from rayapp.core.types import (
    Completion,
    Group,
    GroupSummary,
    Prompt,
    Reward,
    RolloutStatus,
    SamplingParams,
    Trajectory,
)
from rayapp.rollout.agent.episode import Episode
from rayapp.rollout.agent.outcome import to_trajectory, with_reward
from rayapp.rollout.order import GroupRequest, sampling_of

log = logging.getLogger(__name__)


class Play(Protocol):
    """Plays one episode of a prompt, without a deadline of its own."""

    def __call__(
        self, *, engine: RolloutEngine, sampling: SamplingParams, request_id: str
    ) -> Coroutine[Any, Any, Episode]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What the trajectories of one group are to do, and what that is worth."""

    prompt: Prompt
    """Where all of them start; the group records it."""
    play: Play
    score: Callable[[Episode], Awaitable[Reward]]
    """The verdict on an episode, one that failed included. Takes care of infrastructure that fails it."""
    compare: Callable[[Sequence[Trajectory]], Awaitable[Sequence[Reward]]] | None = None
    """What all trajectories are worth beside each other, once they are there."""
    compare_timeout_s: float = 0.0
    """Part of the group's deadline that is kept for it."""


async def run_group(
    request: GroupRequest,
    assignment: Assignment,
    *,
    engine: RolloutEngine,
    sampling: SamplingParams,
    group_size: int,
    seed: int,
    deadline_s: float,
) -> tuple[Group, GroupSummary]:
    """Play and score `group_size` episodes of one prompt.

    Args:
        sampling: for every trajectory; its seed and stop texts are filled in here.
        seed: the run's seed.
        deadline_s: trajectories not finished by then are recorded as failed.
    Raises:
        StaleVersionError, EngineDeadError, WeightSyncError: the server can't serve the version asked for; nothing of
            the group is kept.
        SandboxConfigError: no sandbox can ever be had with this configuration.
        InputError: nothing can score the prompt's episodes.
    """
    started = time.monotonic()
    sampling = replace(sampling, stop=assignment.prompt.stop)

    async def one(index: int) -> Trajectory:
        own = sampling_of(request, sampling, index, group_size=group_size, seed=seed)
        request_id = f"{request.purpose}={request.group_id}/trajectory={index}"
        seat = _CohortSeat(engine, request_id, assignment.prompt, own)
        return await _trajectory(request, assignment, seat, deadline_s - assignment.compare_timeout_s)

    trajectories = await side_by_side(one(index) for index in range(group_size))
    if assignment.compare is not None:
        left_s = deadline_s - (time.monotonic() - started)
        trajectories = await _compared(assignment.compare, trajectories, left_s)
    group = Group(group_id=request.group_id, prompt=assignment.prompt, trajectories=tuple(trajectories))
    return group, summarize_group(group, time_total_s=time.monotonic() - started)


async def _trajectory(
    request: GroupRequest, assignment: Assignment, seat: _CohortSeat, deadline_s: float
) -> Trajectory:
    prompt = assignment.prompt
    try:
        async with asyncio.timeout(deadline_s):
            if not prompt.token_ids.size:
                # An external agent writes its prompts: nobody knows when it first asks, and others shall not wait.
                await seat.fill()
            episode = await assignment.play(engine=seat, sampling=seat.sampling, request_id=seat.request_id)
            reward = await assignment.score(episode)
        await seat.fill()
    except (StaleVersionError, EngineDeadError):
        # Not this trajectory's trouble but its server's: the whole group is sampled again on one that works.
        raise
    except (EngineError, DeadlineError) as error:
        # A DeadlineError is a TimeoutError too, but that of a server or the sandbox pool: it names who did not answer.
        return _failed_trajectory(prompt, request, "engine", str(error))
    except TimeoutError:
        await seat.fill()
        detail = f"not finished after rollout.group_deadline_s = {deadline_s:g}"
        return _failed_trajectory(prompt, request, "deadline", detail)
    return to_trajectory(episode, reward, asked_version=request.policy_version)


async def _compared(
    compare: Callable[[Sequence[Trajectory]], Awaitable[Sequence[Reward]]],
    trajectories: Sequence[Trajectory],
    timeout_s: float,
) -> list[Trajectory]:
    """The trajectories with what they are worth beside each other; without a reward where that takes too long."""
    try:
        async with asyncio.timeout(timeout_s):
            rewards = await compare(trajectories)
    except TimeoutError:
        late = Reward.invalid("judge_timeout", "the group was not compared within rollout.group_deadline_s")
        rewards = [late if each.reward.valid else each.reward for each in trajectories]
    return [with_reward(each, reward) for each, reward in zip(trajectories, rewards, strict=True)]


def _failed_trajectory(prompt: Prompt, request: GroupRequest, kind: str, detail: str) -> Trajectory:
    """A trajectory with no response: it keeps its place in the group and carries no signal."""
    return Trajectory(
        token_ids=prompt.token_ids,
        response_mask=np.zeros(prompt.token_ids.size, np.bool_),
        rollout_log_probs=np.zeros(prompt.token_ids.size, np.float32),
        completion_text="",
        reward=Reward.invalid(kind, detail),
        status=RolloutStatus.ERROR_ENGINE,
        min_policy_version=request.policy_version,
        max_policy_version=request.policy_version,
    )


class _CohortSeat:
    """One trajectory's way to the engine, which keeps its place among the requests that are admitted together.

    A server holds a cohort back until every trajectory in it has asked for its first turn. One that fails before that
    (its tool can't be made, say) would hold up all the others until their deadline, so `fill` asks in its stead.
    """

    def __init__(self, engine: RolloutEngine, request_id: str, prompt: Prompt, sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self._engine = engine
        self._prompt = prompt
        self._is_taken = False

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self._is_taken = True
        return await self._engine.generate(request_id, prompt_ids, sampling)

    async def fill(self) -> None:
        """Ask for one token that nobody reads, unless the trajectory asked for its first turn itself."""
        if self._is_taken:
            return
        self._is_taken = True
        one_token = replace(self.sampling, max_tokens=1)
        try:
            prompt_ids = self._prompt.token_ids.tolist() or [0]
            await self._engine.generate(f"{self.request_id}/turn=0", prompt_ids, one_token)
        except (EngineError, DeadlineError) as error:
            # This trajectory has failed already; those that need the engine will say so themselves.
            log.info("%s: its place in the cohort was not filled: %s", self.request_id, error)
