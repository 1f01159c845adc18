"""Runs one group from prompt to rewards: G concurrent trajectories, each of which is scored as soon as it ends.

    Problem, Agent --G times: play -> Trajectory, verdict -> Reward--> Group, GroupSummary

If an agent, tool, environment, task or judge raises or returns nonsense, only its own trajectory fails, with an ERROR_*
status. The whole group ends only by an error in `verdict.ENDS_GROUP`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rayapp.core.aio import guarded, side_by_side
from rayapp.core.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    RewardFailedError,
    StaleVersionError,
    readable_error,
)
from rayapp.core.protocols import OnTokens, RolloutEngine, SandboxSource
from rayapp.core.trajectories import storable, summarize_group
from rayapp.core.types import (
    Completion,
    Group,
    GroupSummary,
    Int32Array,
    Media,
    Prompt,
    RequestId,
    Reward,
    RolloutStatus,
    SamplingParams,
    Trajectory,
)
from rayapp.rollout.order import GroupRequest, sampling_of, scoring_seed
from rayapp.rollout.problem import Agent, Problem
from rayapp.rollout.recorder import Recorder, failed
from rayapp.storage.media import pictures_of
from rayapp.tasks.verdict import ENDS_GROUP, PLAIN, Judging, ToolRewards, named, settled, verdict

log = logging.getLogger(__name__)


async def run_group(
    request: GroupRequest,
    problem: Problem,
    agent: Agent,
    *,
    sandboxes: SandboxSource,
    judging: Judging | None = None,
    engine: RolloutEngine,
    sampling: SamplingParams,
    group_size: int,
    seed: int,
    deadline_s: float,
) -> tuple[Group, GroupSummary]:
    """Let the agent play a problem `group_size` times, and score each trajectory.

    `judging` that compares trajectories is used only in training; `sampling` gets seeds and stop texts; trajectories
    that are unfinished after `deadline_s` fail. StaleVersionError, EngineDeadError, WeightSyncError: the server can't
    sample with the requested version, and the group is lost. SandboxConfigError: no sandbox can ever be had.
    """
    started, prompt = time.monotonic(), problem.prompt
    sampling = replace(sampling, stop=prompt.stop)
    comparing = judging if judging is not None and judging.compares and request.purpose == "group" else None
    play_s = deadline_s - (comparing.compare_timeout_s if comparing is not None else 0.0)
    tests_seed = scoring_seed(request.group_id, seed=seed)
    pictures = dict(problem.pictures)

    async def one(index: int) -> Trajectory:
        own = sampling_of(request, sampling, index, group_size=group_size, seed=seed)
        place = _CohortPlace(engine, RequestId(request.purpose, request.group_id, index), problem, own)

        async def scored() -> Trajectory:
            played = await guarded(lambda: _played(agent, problem, place), _failed_play)
            pictures.update(place.pictures)
            played = replace(played, media=(*place.media_of(played.token_ids), *played.media))
            return with_reward(played, await reward_of(problem, played, sandboxes, seed=tests_seed, judging=judging))

        played = await _in_time(scored, place, prompt, play_s)
        if played.turns:
            return played
        return replace(played, min_policy_version=request.policy_version, max_policy_version=request.policy_version)

    trajectories = await side_by_side(one(index) for index in range(group_size))
    if comparing is not None:
        left_s = deadline_s - (time.monotonic() - started)
        trajectories = await _compared(comparing, prompt, trajectories, left_s)
    shown = pictures_of(trajectories, pictures)
    group = Group(group_id=request.group_id, prompt=prompt, trajectories=tuple(trajectories), pictures=shown)
    return group, summarize_group(group, time_total_s=time.monotonic() - started)


async def _in_time(
    scored: Callable[[], Awaitable[Trajectory]], place: _CohortPlace, prompt: Prompt, deadline_s: float
) -> Trajectory:
    try:
        async with asyncio.timeout(deadline_s):
            if not prompt.token_ids.size:
                # The agent writes its own prompts and may call late. Send a request for it now, so that the cohort does
                # not wait.
                await place.fill()
            played = await scored()
        await place.fill()
        return played
    except (StaleVersionError, EngineDeadError):
        # The server failed, not this trajectory. The whole group is sampled again on another server.
        raise
    except (EngineError, DeadlineError) as error:
        # A DeadlineError is a TimeoutError of a server or of the sandbox pool; its message names the process.
        return failed(_unplayed(prompt), RolloutStatus.ERROR_ENGINE, str(error), kind="engine")
    except TimeoutError:
        await place.fill()
        detail = f"not finished after rollout.group_deadline_s = {deadline_s:g}"
        return failed(_unplayed(prompt), RolloutStatus.ERROR_ENGINE, detail, kind="deadline")
    except _PlayFailedError as error:
        await place.fill()
        return failed(_unplayed(prompt), RolloutStatus.ERROR_TASK, str(error), kind="agent")


class _PlayFailedError(Exception):
    """The agent raised an exception, or gave a reward that is no number."""


def _failed_play(error: BaseException) -> Exception:
    if isinstance(error, ENDS_GROUP):
        return error
    return _PlayFailedError(f"the agent failed: {type(error).__name__}: {readable_error(error)}")


async def _played(agent: Agent, problem: Problem, place: _CohortPlace) -> Trajectory:
    played = await agent.play(problem, engine=place, sampling=place.sampling, request_id=place.request_id)
    gained = tool_rewards(played)
    for value in (gained.calls, gained.verdicts, *play_terms(played).values()):
        storable(value)
    return played


async def reward_of(
    problem: Problem, played: Trajectory, sandboxes: SandboxSource, *, seed: int, judging: Judging | None = None
) -> Reward:
    """Score a trajectory; a failed one keeps its invalid reward. `seed` draws the hidden tests."""
    reward = settled(played.reward)
    if not played.status.is_error:
        reward = await verdict(
            lambda: problem.score(problem, played, sandboxes, seed),
            weights=problem.weights or PLAIN,
            tools=tool_rewards(played) if problem.weights is not None else None,
            judge=partial(judging.with_scores, problem.prompt, played.completion_text) if judging is not None else None,
        )
    return with_terms(reward, played) if problem.weights is not None else reward


async def _compared(
    judging: Judging, prompt: Prompt, trajectories: Sequence[Trajectory], timeout_s: float
) -> list[Trajectory]:
    # If the comparison fails or takes too long, all rewards become invalid.
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
    return replace(Recorder(prompt.token_ids.tolist()).trajectory(), media=prompt.media)


class _CohortPlace:
    """The engine as one trajectory sees it. It makes sure that the trajectory sends at least one request.

    A server waits for the first request of every trajectory in a cohort (groups that are admitted together). A
    trajectory that fails before would delay all others until their deadline, so `fill` sends a request for it.
    """

    def __init__(
        self, engine: RolloutEngine, request_id: RequestId, problem: Problem, sampling: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.sampling = sampling
        self._engine = engine
        self._prompt = problem.prompt
        self.pictures = dict(problem.pictures)
        self._is_taken = False

    async def generate(
        self,
        request_id: RequestId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        self._is_taken = True
        if media := (*self.media_of(prompt_ids), *sampling.media):
            self.pictures |= sampling.pictures
            pictures = {each.sha256: self.pictures[each.sha256] for each in media}
            sampling = replace(sampling, media=media, pictures=pictures)
        return await self._engine.generate(request_id, prompt_ids, sampling, on_tokens)

    def media_of(self, token_ids: Sequence[int] | Int32Array) -> Media:
        """Return the prompt's pictures if the tokens begin with the prompt; else none."""
        own = self._prompt.token_ids
        if not self._prompt.media or not np.array_equal(np.asarray(token_ids[: own.size], np.int32), own):
            return ()
        return self._prompt.media

    async def fill(self) -> None:
        if self._is_taken:
            return
        self._is_taken = True
        one_token = replace(self.sampling, max_tokens=1)
        try:
            prompt_ids = self._prompt.token_ids.tolist() or [0]
            await self.generate(self.request_id._replace(turn=0), prompt_ids, one_token)
        except (EngineError, DeadlineError) as error:
            # Only log the error: this trajectory has already failed, and other trajectories will report the engine's
            # error.
            log.info("%s: no first request could be sent for this failed trajectory: %s", self.request_id, error)


def with_terms(reward: Reward, played: Trajectory) -> Reward:
    return replace(reward, terms={**reward.terms, **play_terms(played)})


def tool_rewards(played: Trajectory) -> ToolRewards:
    calls = sum(call.reward for call in played.calls if call.reward is not None)
    return ToolRewards(calls=calls, verdicts=sum(played.tool_rewards.values()))


def with_reward(trajectory: Trajectory, reward: Reward) -> Trajectory:
    """Return the trajectory with this reward. If the reward is invalid, the trajectory's status becomes a failure."""
    status = trajectory.status
    if not reward.valid and not status.is_error:
        is_own = reward.failure_kind.startswith(("reward_", "judge_"))
        status = RolloutStatus.ERROR_REWARD if is_own else RolloutStatus.ERROR_SANDBOX
    return replace(trajectory, reward=reward, status=status)


def play_terms(played: Trajectory) -> dict[str, float]:
    """Return numbers about a trajectory, which metrics record beside the reward's terms.

    Example: {"num_turns": 3, "tool/calls": 2, "tool/failed": 1, "tool/failed/timeout": 1, "tool/time_s": 0.4,
    "tool/wait_s": 0, "tool/reward/calc_gsm8k_reward": 1.0, "tool/step_reward": -0.05}.
    """
    calls = played.calls
    failures = Counter(call.failure for call in calls if call.failure)
    step_rewards = [call.reward for call in calls if call.reward is not None]
    terms: dict[str, float] = {
        "num_turns": float(len(played.turns)),
        "tool/calls": float(len(calls)),
        "tool/failed": float(sum(failures.values())),
        "tool/time_s": sum(call.duration_s - call.waited_s for call in calls),
        "tool/wait_s": sum(call.waited_s for call in calls),
    }
    terms |= {f"tool/failed/{kind}": float(count) for kind, count in failures.items()}
    terms |= {f"agent/{name}": value for name, value in played.agent_counts.items()}
    terms |= {f"tool/reward/{name}": value for name, value in played.tool_rewards.items()}
    if step_rewards:
        terms["tool/step_reward"] = float(sum(step_rewards))
    return terms
