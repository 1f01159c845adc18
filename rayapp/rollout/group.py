"""Runs one group from prompt to rewards: G concurrent plays, each scored as soon as it ends.

    Assignment(prompt, play, truth) --G times: play -> Trajectory, verdict -> Reward--> Group, GroupSummary

Called by the rollout worker; needs no Ray. A coding task and a data row differ only in their `Assignment`. A trajectory
that fails for other reasons than the policy gets an ERROR_* status and raises no exception: whatever an agent, tool,
environment, task or judge raises or returns affects only its own trajectory. Only errors of `verdict.ENDS_GROUP` are
raised.
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
    """Scores a play that did not fail. May raise anything: `verdict` handles it."""
    weights: Weights = PLAIN
    records_calls: bool = True
    """True if rewards have terms for tools and turns."""
    judging: Judging | None = None
    compares: bool = False
    """True if judges compare the trajectories of the group."""

    @property
    def compare_timeout_s(self) -> float:
        """Part of the group's deadline that is reserved for comparisons."""
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
        sampling: sampling of every trajectory; seed and stop texts are filled in here.
        seed: the run's seed.
        deadline_s: trajectories not finished by then are recorded as failed.
    Raises:
        StaleVersionError, EngineDeadError, WeightSyncError: the server can't serve the requested version; the whole
        group is lost.
        ProcessDiedError, ObjectsLostError: another process of ours is gone.
        SandboxConfigError: this configuration can never provide a sandbox.
    """
    started = time.monotonic()
    sampling = replace(sampling, stop=assignment.prompt.stop)

    async def one(index: int) -> Trajectory:
        own = sampling_of(request, sampling, index, group_size=group_size, seed=seed)
        request_id = RequestId(request.purpose, request.group_id, index)
        place = _CohortPlace(engine, request_id, assignment.prompt, own)
        return await _trajectory(request, assignment, place, deadline_s - assignment.compare_timeout_s)

    trajectories = await side_by_side(one(index) for index in range(group_size))
    if assignment.judging is not None and assignment.compares:
        left_s = deadline_s - (time.monotonic() - started)
        trajectories = await _compared(assignment.judging, assignment.prompt, trajectories, left_s)
    group = Group(group_id=request.group_id, prompt=assignment.prompt, trajectories=tuple(trajectories))
    return group, summarize_group(group, time_total_s=time.monotonic() - started)


async def _trajectory(
    request: GroupRequest, assignment: Assignment, place: _CohortPlace, deadline_s: float
) -> Trajectory:
    prompt = assignment.prompt
    try:
        async with asyncio.timeout(deadline_s):
            if not prompt.token_ids.size:
                # An external agent writes its own prompts and may call late: don't let the cohort wait for its first
                # call.
                await place.fill()
            played = await guarded(lambda: _played(assignment.play, place), _failed_play)
            reward = await _scored(assignment, played)
        await place.fill()
    except (StaleVersionError, EngineDeadError):
        # The server failed, not this trajectory: the whole group is sampled again on another server.
        raise
    except (EngineError, DeadlineError) as error:
        # A DeadlineError is a TimeoutError too, but one of a server or the sandbox pool: its message names the process.
        played = failed(_unplayed(prompt), RolloutStatus.ERROR_ENGINE, str(error), kind="engine")
    except TimeoutError:
        await place.fill()
        detail = f"not finished after rollout.group_deadline_s = {deadline_s:g}"
        played = failed(_unplayed(prompt), RolloutStatus.ERROR_ENGINE, detail, kind="deadline")
    except _PlayFailedError as error:
        await place.fill()
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


async def _played(play: Play, place: _CohortPlace) -> Trajectory:
    """Play once. A plug-in's trajectory is checked, because terms and arrays of the whole group depend on it."""
    played: object = await play(engine=place, sampling=place.sampling, request_id=place.request_id)
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
    """Return the trajectory's reward; if it failed, its invalid reward."""
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
    """Return a trajectory without a response: it fills its place in the group, and is not trained on."""
    return Recorder(prompt.token_ids.tolist()).trajectory()


class _CohortPlace:
    """Engine of one trajectory, which keeps the trajectory's place among the requests that are admitted together.

    A server waits for the first request of every trajectory in a cohort. A trajectory that fails before its first
    request (for example, its tool can't be made) would delay all others until their deadline, so `fill` sends a request
    for it.
    """

    def __init__(self, engine: RolloutEngine, request_id: RequestId, prompt: Prompt, sampling: SamplingParams) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self._engine = engine
        self._prompt = prompt
        self._is_taken = False

    async def generate(self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        if not isinstance(request_id, RequestId):  # of a plug-in: one bad id would end the whole batch
            raise TypeError(f"request_id is {request_id!r:.60}, not a RequestId: pass request_id._replace(turn=N)")
        self._is_taken = True
        return await self._engine.generate(request_id, prompt_ids, sampling)

    async def fill(self) -> None:
        """Sample one token and drop it, unless the trajectory has sent its first request."""
        if self._is_taken:
            return
        self._is_taken = True
        one_token = replace(self.sampling, max_tokens=1)
        try:
            prompt_ids = self._prompt.token_ids.tolist() or [0]
            await self._engine.generate(self.request_id._replace(turn=0), prompt_ids, one_token)
        except (EngineError, DeadlineError) as error:
            # This trajectory has failed already; those that need the engine will report its error.
            log.info("%s: its place in the cohort was not filled: %s", self.request_id, error)
