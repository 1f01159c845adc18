"""One group of a data row: G episodes of the agent loop side by side, each scored the moment it ends.

Called by the rollout worker; needs no Ray. The counterpart of `group.py`, which runs groups of coding tasks. What
infrastructure does to a trajectory is data with an ERROR_* status; mistakes of the configuration are raised.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayapp.core.errors import DeadlineError, EngineDeadError, EngineError, StaleVersionError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.summaries import summarize_group
from rayapp.core.types import Completion, Group, GroupSummary, Prompt, Reward, SamplingParams, Trajectory
from rayapp.rollout.agent.episode import AgentPrompt, Episode
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agent.loops import AgentLoops
from rayapp.rollout.agent.outcome import to_trajectory
from rayapp.rollout.group import failed_trajectory, gather_trajectories, late_trajectory
from rayapp.rollout.order import GroupRequest, sampling_of
from rayapp.tasks.answers import Answer, AnswerRewards, score_answer
from rayapp.tasks.data.data_row import DataRow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWork:
    """What all groups of a process share."""

    loops: AgentLoops
    """The row's agent_name says which one plays it."""
    rewards: AnswerRewards
    deadline_s: float
    """Trajectories not finished by then are recorded as failed."""
    seed: int
    """The run's."""


async def run_agent_group(
    request: GroupRequest,
    row: DataRow,
    work: AgentWork,
    *,
    engine: RolloutEngine,
    sampling: SamplingParams,
    group_size: int,
) -> tuple[Group, GroupSummary]:
    """Play and score `group_size` episodes of one row.

    Raises:
        StaleVersionError, EngineDeadError: the server can't serve the version asked for; nothing of the group is kept.
        SandboxConfigError: no sandbox can ever be had with this configuration.
        InputError: there is no rule for the row's data source, or no loop of its agent_name.
    """
    started = time.monotonic()
    loop = work.loops.of(row.agent_name)
    group_of_row = _RowGroup(
        request=request, row=row, work=work, loop=loop, engine=engine, sampling=sampling, group_size=group_size
    )
    trajectories = await gather_trajectories([group_of_row.trajectory(index) for index in range(group_size)])
    group = Group(group_id=request.group_id, prompt=group_of_row.prompt, trajectories=tuple(trajectories))
    return group, summarize_group(group, time_total_s=time.monotonic() - started)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowGroup:
    request: GroupRequest
    row: DataRow
    work: AgentWork
    loop: AgentLoop
    engine: RolloutEngine
    sampling: SamplingParams
    group_size: int

    @property
    def prompt(self) -> Prompt:
        """What the group records: the row's source stands where a task's name would."""
        ids = self.row.prompt_ids
        text = self.loop.chat.tokenizer.decode(list(ids), skip_special_tokens=False)
        return Prompt(task=self.row.data_source, text=text, token_ids=np.array(ids, np.int32))

    async def trajectory(self, index: int) -> Trajectory:
        request, work = self.request, self.work
        request_id = f"{request.purpose}={request.group_id}/trajectory={index}"
        seat = _CohortSeat(self.engine, f"{request_id}/turn=0", self.row.prompt_ids, self._sampling(index))
        try:
            async with asyncio.timeout(work.deadline_s):
                episode = await self.loop.run(
                    self._prompt_of_loop(), engine=seat, sampling=self._sampling(index), request_id=request_id
                )
                reward = await self._score(episode)
            await seat.fill()
        except (StaleVersionError, EngineDeadError):
            # Its server's trouble: the whole group is sampled again on one that works.
            raise
        except (EngineError, DeadlineError) as error:  # a DeadlineError is a TimeoutError too, and not the group's
            return failed_trajectory(self.prompt, request, "engine", str(error))
        except TimeoutError:
            await seat.fill()
            return late_trajectory(self.prompt, request, work.deadline_s)
        return to_trajectory(episode, reward, asked_version=request.policy_version)

    def _sampling(self, index: int) -> SamplingParams:
        return sampling_of(self.request, self.sampling, index, group_size=self.group_size, seed=self.work.seed)

    def _prompt_of_loop(self) -> AgentPrompt:
        row = self.row
        return AgentPrompt(messages=row.messages, token_ids=row.prompt_ids, tools_kwargs=row.tools_kwargs)

    async def _score(self, episode: Episode) -> Reward | None:
        if episode.status.is_error:
            return None
        answer = Answer(
            completion_text=episode.final_text,
            data_source=self.row.data_source,
            ground_truth=self.row.ground_truth,
            extra_info=self.row.extra_info,
            tool_reward=sum(call.reward for call in episode.calls if call.reward is not None),
        )
        return await score_answer(answer, self.work.rewards)


class _CohortSeat:
    """One trajectory's way to the engine, which keeps its place among the requests that are admitted together.

    A server holds a cohort back until every trajectory in it has asked for its first turn. One that fails before that
    (its tool can't be made, say) would hold up all the others until their deadline, so `fill` asks in its stead.
    """

    def __init__(
        self, engine: RolloutEngine, first_request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        self._engine = engine
        self._first = (first_request_id, prompt_ids, replace(sampling, max_tokens=1))
        self._is_taken = False

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        self._is_taken = True
        return await self._engine.generate(request_id, prompt_ids, sampling)

    async def fill(self) -> None:
        """Ask for one token that nobody reads, unless the trajectory asked for its first turn itself."""
        if self._is_taken:
            return
        self._is_taken = True
        try:
            await self._engine.generate(*self._first)
        except EngineError as error:
            # This trajectory has failed already; those that need the engine will say so themselves.
            log.info("%s: its place in the cohort was not filled: %s", self._first[0], error)
