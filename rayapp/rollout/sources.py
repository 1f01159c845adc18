"""Where a rollout worker's groups come from: the run's sources, each coding tasks or rows of data with the agent loop.

    open_groups(config, sandboxes) -> RunGroups     .assignment(request) -> what `run_group` plays
                                        |-- source 0: TaskGroups | DataGroups, under the run's config as it has it
                                        '-- source 1: …

Called by the rollout worker once; what can't work (a file, a template, a tool's service) is told here, at the start.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from rayapp.config.agent import EXTERNAL_AGENT
from rayapp.config.config import Config, Source, sources_of
from rayapp.config.model_servers import server_named
from rayapp.core.errors import UserError
from rayapp.core.protocols import SandboxSource, Task
from rayapp.core.types import Reward, Trajectory
from rayapp.rollout.agent.episode import Episode
from rayapp.rollout.agent.loops import SINGLE_TURN_AGENT
from rayapp.rollout.data_groups import DataGroups
from rayapp.rollout.environments.agents import EnvironmentAgents, plays_environments
from rayapp.rollout.external.agent import ExternalAgent
from rayapp.rollout.group import Assignment
from rayapp.rollout.mixing import Mixing
from rayapp.rollout.order import GroupRequest
from rayapp.rollout.prompts import prompted_tasks
from rayapp.rollout.task_agents import TaskAgents
from rayapp.rollout.task_groups import TaskGroups
from rayapp.storage.models.prefetch import with_local_model
from rayapp.tasks.loading import load_tasks

if TYPE_CHECKING:
    from rayapp.tasks.judges.judging import Judges, Judging


class Groups(Protocol):
    """Groups of one source."""

    @property
    def num_eval_prompts(self) -> int:
        """Prompts of one evaluation; a request of purpose `eval` names one by its place."""
        ...

    @property
    def num_train_prompts(self) -> int:
        """Prompts of one epoch of training."""
        ...

    async def assignment(self, request: GroupRequest, *, seed: int) -> Assignment:
        """What the trajectories of this group are to do.

        Args:
            request: its `place` counts the groups of this source alone.
            seed: the run's: it orders the prompts, and draws what the trajectories are scored by.
        Raises:
            InputError: nothing plays the prompt.
        """
        ...

    async def close(self) -> None: ...


class RunGroups:
    """Groups of all sources of a run.

    Args:
        groups: one for each source.
        seed: the run's.
        judges: that sources name; None where none does.
    """

    def __init__(
        self, sources: Sequence[Source], groups: Sequence[Groups], *, seed: int, judges: Judges | None = None
    ) -> None:
        self._sources = sources
        self._groups = groups
        self._judges = judges
        self._mixing = Mixing([source.ratio for source in sources], seed=seed)

    @property
    def num_eval_prompts(self) -> tuple[int, ...]:
        """Prompts of one evaluation by source. Requests of purpose `eval` count through all of them."""
        return tuple(groups.num_eval_prompts for groups in self._groups)

    @property
    def num_train_prompts(self) -> tuple[int, ...]:
        """Prompts of one epoch by source."""
        return tuple(groups.num_train_prompts for groups in self._groups)

    def config_of(self, request: GroupRequest) -> Config:
        """The run's configuration as the group's source has it."""
        return self._sources[self._place(request)[0]].config

    async def assignment(self, request: GroupRequest, *, seed: int) -> Assignment:
        """As `Groups.assignment`, for a request that counts the groups of the run."""
        index, place = self._place(request)
        assignment = await self._groups[index].assignment(replace(request, prompt=place), seed=seed)
        assignment = replace(assignment, prompt=replace(assignment.prompt, source=self._sources[index].name))
        if self._judges is None:
            return assignment
        judging = self._judges.of(self._sources[index].config.reward)
        return judged(assignment, judging, compares=request.purpose == "group")

    def _place(self, request: GroupRequest) -> tuple[int, int]:
        """Index of the request's source, and its place among the groups of that."""
        if request.purpose == "eval":
            starts = list(accumulate(self.num_eval_prompts, initial=0))
            index = bisect_right(starts, request.group_id) - 1
            return index, request.group_id - starts[index]
        if request.source is None and request.prompt is None:
            return self._mixing.place(request.group_id)
        return request.source or 0, request.place

    async def close(self) -> None:
        """End what the tools hold, of all sources whatever one of them says."""
        closing = [groups.close() for groups in self._groups]
        if self._judges is not None:
            closing.append(self._judges.close())
        ended = await asyncio.gather(*closing, return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error


async def open_groups(config: Config, sandboxes: SandboxSource) -> RunGroups:
    """The groups of a run.

    Raises:
        UserError: a task, a file, the chat template or a tool can't be used; with the name of its source.
    """
    config = await asyncio.to_thread(with_local_model, config)
    sources, opened = sources_of(config), list[Groups]()
    judges = open_judges(config)
    groups = RunGroups(sources, opened, seed=config.run.seed, judges=judges)
    try:
        if judges is not None:
            await judges.check()  # before anything is sampled
        for source in sources:
            with naming(source):
                opened.append(await _open(source.config, sandboxes))
    except BaseException:
        await groups.close()
        raise
    return groups


def open_judges(config: Config, *, of_run: bool = True) -> Judges | None:
    """The judges of a rollout worker; None in a run without. Raises ConfigError: a key is not set.

    Args:
        of_run: also those on the run's own servers.
    """
    names = {name for source in sources_of(config) for name in source.config.reward.judges}
    used = [each for each in config.judges if each.name in names and (of_run or not server_named(each.base_url))]
    if not used:
        return None
    from rayapp.tasks.judges.judging import Judges  # imports aiohttp, which runs without judges don't need

    return Judges(used, config.run_folder, num_sharing=config.rollout.num_workers)


def judged(assignment: Assignment, judging: Judging, *, compares: bool) -> Assignment:
    """The assignment with judges in what its trajectories are worth.

    Args:
        compares: with those that compare them: what evaluation samples is not compared with itself.
    """
    prompt, verdict = assignment.prompt, assignment.score

    async def score(episode: Episode) -> Reward:
        return await judging.with_scores(prompt, episode.final_text, await verdict(episode))

    async def compare(trajectories: Sequence[Trajectory]) -> Sequence[Reward]:
        texts = [each.completion_text for each in trajectories]
        return await judging.with_comparisons(prompt, texts, [each.reward for each in trajectories])

    if not (compares and judging.compares):
        return replace(assignment, score=score)
    return replace(assignment, score=score, compare=compare, compare_timeout_s=judging.compare_timeout_s)


async def _open(config: Config, sandboxes: SandboxSource) -> Groups:
    if config.uses_data:
        return await DataGroups.open(config, sandboxes)
    # In a thread: an environment may have to be installed, and its process asked.
    train = await asyncio.to_thread(load_tasks, config.tasks)
    held_out = await asyncio.to_thread(load_tasks, config.eval.tasks) if config.eval.tasks else ()
    agents = await _agents(config, sandboxes, (*train, *held_out))
    if agents is None:
        return TaskGroups(prompted_tasks(config, train), prompted_tasks(config, held_out), sandboxes)
    try:
        return TaskGroups(await agents.prompted(train), await agents.prompted(held_out), sandboxes, agents)
    except BaseException:
        await agents.close()
        raise


async def _agents(
    config: Config, sandboxes: SandboxSource, tasks: Sequence[Task]
) -> TaskAgents | ExternalAgent | EnvironmentAgents | None:
    """Who plays the tasks; None: the policy speaks once."""
    if plays_environments(tasks):
        return EnvironmentAgents.of(config, sandboxes)
    if config.default_agent == SINGLE_TURN_AGENT:
        return None
    if config.default_agent == EXTERNAL_AGENT:
        return await ExternalAgent.open(config, sandboxes)
    return TaskAgents.of(config, sandboxes)


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """What a user can correct in the block is of this source, and says so."""
    try:
        yield
    except UserError as error:
        if not source.name:
            raise
        raise type(error)(f"source {source.name}: {error}") from error
