"""One group from prompt to rewards: G plays side by side, each scored as soon as it ends.

    Assignment(prompt, play, truth) --G times: play -> Trajectory, verdict -> Reward--> Group, GroupSummary

Called by the rollout worker; needs no Ray. A coding task and a data row differ only in their `Assignment`. A trajectory
that fails for reasons that are not the policy's is data with an ERROR_* status, never an exception: whatever an agent,
a tool, an environment, a task or a judge raises or returns costs its own trajectory. Only errors of
`verdict.ENDS_GROUP` are raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rayapp.core.aio import guarded, side_by_side
from rayapp.core.errors import DeadlineError, EngineDeadError, EngineError, StaleVersionError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.trajectories import storable, summarize_group
from rayapp.core.types import (
    Completion,
    Group,
    GroupSummary,
    Prompt,
    RequestId,
    Reward,
    RolloutStatus,
    SamplingParams,
    Trajectory,
)
from rayapp.rollout.agent.outcome import play_terms, tool_rewards, with_reward, with_terms
from rayapp.rollout.order import GroupRequest, sampling_of
from rayapp.rollout.recorder import Recorder, failed
from rayapp.tasks.custom_rewards import RewardFailedError, readable_error
from rayapp.tasks.verdict import ENDS_GROUP, PLAIN, Weights, named, settled, verdict

if TYPE_CHECKING:
    from rayapp.tasks.judges.judging import Judging  # imports aiohttp

log = logging.getLogger(__name__)


class Play(Protocol):
    """Plays a prompt once, without a deadline of its own."""

    def __call__(
        self, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Coroutine[Any, Any, Trajectory]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Prompt, player and scoring of one group's trajectories."""

    prompt: Prompt
    """Prompt of all trajectories; the group records it."""
    play: Play
    truth: Callable[[Trajectory], Awaitable[Reward]]
    """Scores a play that did not fail. May raise anything: see `verdict`."""
    weights: Weights = PLAIN
    records_calls: bool = True
    """Whether rewards have terms of tools and turns."""
    judging: Judging | None = None
    compares: bool = False
    """Whether judges compare the trajectories of the group."""

    @property
    def compare_timeout_s(self) -> float:
        """Part of the group's deadline that is kept for comparisons."""
        return self.judging.compare_timeout_s if self.judging is not None and self.compares else 0.0


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
    """Play one prompt `group_size` times, and score each play.

    Args:
        sampling: for every trajectory; its seed and stop texts are filled in here.
        seed: the run's seed.
        deadline_s: trajectories not finished by then are recorded as failed.
    Raises:
        StaleVersionError, EngineDeadError, WeightSyncError: the server can't serve the version asked for; nothing of
            the group is kept.
        ProcessDiedError, ObjectsLostError: another process of ours is gone.
        SandboxConfigError: no sandbox can ever be had with this configuration.
    """
    started = time.monotonic()
    sampling = replace(sampling, stop=assignment.prompt.stop)

    async def one(index: int) -> Trajectory:
        own = sampling_of(request, sampling, index, group_size=group_size, seed=seed)
        request_id = RequestId(request.purpose, request.group_id, index)
        seat = _CohortPlace(engine, request_id, assignment.prompt, own)
        return await _trajectory(request, assignment, seat, deadline_s - assignment.compare_timeout_s)

    trajectories = await side_by_side(one(index) for index in range(group_size))
    if assignment.judging is not None and assignment.compares:
        left_s = deadline_s - (time.monotonic() - started)
        trajectories = await _compared(assignment.judging, assignment.prompt, trajectories, left_s)
    group = Group(group_id=request.group_id, prompt=assignment.prompt, trajectories=tuple(trajectories))
    return group, summarize_group(group, time_total_s=time.monotonic() - started)


async def _trajectory(
    request: GroupRequest, assignment: Assignment, seat: _CohortPlace, deadline_s: float
) -> Trajectory:
    prompt = assignment.prompt
    try:
        async with asyncio.timeout(deadline_s):
            if not prompt.token_ids.size:
                # An external agent writes its prompts: nobody knows when it first asks, and others shall not wait.
                await seat.fill()
            played = await guarded(lambda: _played(assignment.play, seat), _failed_play)
            reward = await _scored(assignment, played)
        await seat.fill()
    except (StaleVersionError, EngineDeadError):
        # Not this trajectory's trouble but its server's: the whole group is sampled again on one that works.
        raise
    except (EngineError, DeadlineError) as error:
        # A DeadlineError is a TimeoutError too, but that of a server or the sandbox pool: it names who did not answer.
        played = failed(_unplayed(prompt), RolloutStatus.ERROR_ENGINE, str(error), kind="engine")
    except TimeoutError:
        await seat.fill()
        detail = f"not finished after rollout.group_deadline_s = {deadline_s:g}"
        played = failed(_unplayed(prompt), RolloutStatus.ERROR_ENGINE, detail, kind="deadline")
    except _PlayFailedError as error:
        await seat.fill()
        played = failed(_unplayed(prompt), RolloutStatus.ERROR_TASK, str(error), kind="agent")
    else:
        played = with_reward(played, reward)
    if played.turns:
        return played
    return replace(played, min_policy_version=request.policy_version, max_policy_version=request.policy_version)


class _PlayFailedError(Exception):
    """The player of a trajectory raised, or returned no Trajectory."""


def _failed_play(error: BaseException) -> Exception:
    if isinstance(error, ENDS_GROUP):
        return error
    return _PlayFailedError(f"the agent failed: {type(error).__name__}: {readable_error(error)}")


async def _played(play: Play, seat: _CohortPlace) -> Trajectory:
    """Play once. A plug-in's trajectory is checked: the terms and the arrays of the group are made from it."""
    played: object = await play(engine=seat, sampling=seat.sampling, request_id=seat.request_id)
    if not isinstance(played, Trajectory):
        raise TypeError(f"it gave a {type(played).__name__}, not a Trajectory")
    if not played.token_ids.shape == played.response_mask.shape == played.rollout_log_probs.shape:
        raise ValueError("its token_ids, response_mask and rollout_log_probs differ in length")
    if not isinstance(played.completion_text, str):
        raise TypeError(f"its answer is a {type(played.completion_text).__name__}, not a text")
    gained = tool_rewards(played)
    for value in (gained.calls, gained.verdicts, *play_terms(played).values()):
        storable(value)
    return played


async def _scored(assignment: Assignment, played: Trajectory) -> Reward:
    """Return the trajectory's reward; if it failed, the invalid one that it has."""
    reward = settled(played.reward)
    if not played.status.is_error:
        judging, prompt = assignment.judging, assignment.prompt
        reward = await verdict(
            partial(assignment.truth, played),
            weights=assignment.weights,
            tools=tool_rewards(played) if assignment.records_calls else None,
            judge=partial(judging.with_scores, prompt, played.completion_text) if judging is not None else None,
        )
    return with_terms(reward, played) if assignment.records_calls else reward


async def _compared(
    judging: Judging, prompt: Prompt, trajectories: Sequence[Trajectory], timeout_s: float
) -> list[Trajectory]:
    """Return the trajectories with the scores of judges that compare them; invalid if that fails or takes too long."""
    texts, known = [each.completion_text for each in trajectories], [each.reward for each in trajectories]
    try:
        async with asyncio.timeout(timeout_s):
            rewards = await guarded(lambda: judging.with_comparisons(prompt, texts, known), named)
    except TimeoutError:
        late = Reward.invalid("judge_timeout", "the group was not compared within rollout.group_deadline_s")
        rewards = [late if each.valid else each for each in known]
    except RewardFailedError as error:
        failed = Reward.invalid(error.kind, str(error))
        rewards = [failed if each.valid else each for each in known]
    return [with_reward(each, settled(reward)) for each, reward in zip(trajectories, rewards, strict=True)]


def _unplayed(prompt: Prompt) -> Trajectory:
    """Return a trajectory with no response: it keeps its place in the group and carries no signal."""
    return Recorder(prompt.token_ids.tolist()).trajectory()


class _CohortPlace:
    """Engine of one trajectory, which keeps the trajectory's place among the requests that are admitted together.

    A server holds a cohort back until every trajectory in it has asked for its first turn. One that fails before that
    (its tool can't be made, say) would hold up all the others until their deadline, so `fill` asks in its stead.
    """

    def __init__(self, engine: RolloutEngine, request_id: RequestId, prompt: Prompt, sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self._engine = engine
        self._prompt = prompt
        self._is_taken = False

    async def generate(self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        if not isinstance(request_id, RequestId):  # a plug-in's: one bad id would end the whole batch
            raise TypeError(f"request_id is {request_id!r:.60}, not a RequestId: pass request_id._replace(turn=N)")
        self._is_taken = True
        return await self._engine.generate(request_id, prompt_ids, sampling)

    async def fill(self) -> None:
        """Sample one token and drop it, unless the trajectory asked for its first turn itself."""
        if self._is_taken:
            return
        self._is_taken = True
        one_token = replace(self.sampling, max_tokens=1)
        try:
            prompt_ids = self._prompt.token_ids.tolist() or [0]
            await self._engine.generate(self.request_id._replace(turn=0), prompt_ids, one_token)
        except (EngineError, DeadlineError) as error:
            # This trajectory has failed already; those that need the engine will say so themselves.
            log.info("%s: its place in the cohort was not filled: %s", self.request_id, error)
