"""Groups of a rollout worker, from the run's sources: each has coding tasks or rows of data.

    open_groups(config, sandboxes) -> RunGroups     .assignment(request) -> what `run_group` plays
                                        |-- source 0: TaskGroups | DataGroups, under the run's config as it has it
                                        '-- source 1: …

`DataGroups` plays rows and scores them by the rule of the row's source. `TaskGroups` samples one turn, or lets an agent
play, and the task scores the text. Called by the rollout worker once; a file, template or tool's service that can't
work is reported here, at the start.
"""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rayapp.config.agent import EXTERNAL_AGENT
from rayapp.config.config import Config, Source, sources_of
from rayapp.config.other_models import server_named
from rayapp.core.errors import UserError
from rayapp.core.protocols import RolloutEngine, SandboxSource, Task
from rayapp.core.types import Prompt, RequestId, Reward, RolloutStatus, SamplingParams, Trajectory
from rayapp.rollout.agent.build import open_loop
from rayapp.rollout.agents import (
    SINGLE_TURN_AGENT,
    AgentLoops,
    TaskAgents,
    agent_loops,
    check_agent_name,
    prompted_tasks,
)
from rayapp.rollout.environments.agent import EnvironmentAgents, environment_reward, plays_environments
from rayapp.rollout.external_agent import ExternalAgent
from rayapp.rollout.group import Assignment
from rayapp.rollout.order import GroupRequest, Mixing, prompt_index, scoring_seed
from rayapp.rollout.recorder import AgentPrompt, Recorder
from rayapp.storage.models.fetch import with_local_model
from rayapp.tasks.answers import Answer, AnswerRewards, truth_of
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.data.reading import Encode, ReadOptions, TrainingData, open_data
from rayapp.tasks.loading import load_tasks
from rayapp.tasks.verdict import PLAIN, Weights

if TYPE_CHECKING:
    from rayapp.tasks.judges.judging import Judges


Players = AgentLoops | ExternalAgent
"""Players of rows."""
MAX_KEPT_CHARS = 1 << 16


@dataclass(slots=True, eq=False, repr=False)
class DataGroups:
    """Groups of data rows; group N of the training is row N of the run, whatever worker it is on."""

    config: Config
    players: Players
    rewards: AnswerRewards
    sandboxes: SandboxSource
    train: TrainingData | None
    held_out: TrainingData | None
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @classmethod
    async def open(cls, config: Config, sandboxes: SandboxSource) -> DataGroups:
        """See `open_groups`."""
        rewards = answer_rewards(config)
        if rewards.custom is not None:
            # Its imports may take seconds, which would hold up every trajectory of this process.
            await asyncio.to_thread(rewards.custom.load)
        players: Players = (
            await ExternalAgent.open(config, sandboxes)
            if config.agent_name == EXTERNAL_AGENT
            else agent_loops(await open_loop(config, sandboxes), config.agent_name)
        )
        try:
            train, held_out = await open_files(config, players.prompt_ids)
        except BaseException:
            await players.close()
            raise
        return cls(config, players, rewards, sandboxes, train=train, held_out=held_out)

    @property
    def num_eval_prompts(self) -> int:
        if self.held_out is None:
            return 0
        return min(len(self.held_out), self.config.eval.max_problems or len(self.held_out))

    @property
    def num_train_prompts(self) -> int:
        return len(self.train) if self.train is not None else 0

    async def assignment(self, request: GroupRequest, *, seed: int) -> Assignment:
        tests = scoring_seed(request.group_id, seed=seed)
        return assignment_of(await self._row(request), self.players, self.rewards, self.sandboxes, seed=tests)

    async def _row(self, request: GroupRequest) -> DataRow:
        rows = self.train if request.purpose == "group" else self.held_out
        assert rows is not None, "the driver checks which files a command needs"
        # One at a time: two groups that reach a new window of rows together would both load it.
        async with self._reading:
            return await asyncio.to_thread(rows.row, request.place)

    async def close(self) -> None:
        """End what the tools hold."""
        await self.players.close()


def assignment_of(
    row: DataRow, players: Players, rewards: AnswerRewards, sandboxes: SandboxSource, *, seed: int = 0
) -> Assignment:
    """Return the assignment of a row's group.

    Args:
        sandboxes: where code in the answers runs.
        seed: draws the hidden tests of a code problem.
    Raises:
        InputError: there is no loop of the row's agent_name, or nothing can score its data_source.
    """
    rewards.truth_kind(row.data_source)
    truth = partial(_found, row, rewards, sandboxes, seed)
    if isinstance(players, ExternalAgent):
        prompt = replace(players.prompt(row.data_source, row.messages), **_facts(row))
        play = players.playing(row.data_source, row.messages)
        return Assignment(prompt=prompt, play=play, truth=truth, weights=rewards.weights)
    loop = players.of(row.agent_name)
    text = loop.chat.tokenizer.decode(list(row.prompt_ids), skip_special_tokens=False)
    return Assignment(
        # The row's source stands where a task's name would.
        prompt=Prompt(task=row.data_source, text=text, token_ids=np.array(row.prompt_ids, np.int32), **_facts(row)),
        play=partial(
            players.player(row.agent_name).run, AgentPrompt(token_ids=row.prompt_ids, tools_kwargs=row.tools_kwargs)
        ),
        truth=truth,
        weights=rewards.weights,
    )


def _facts(row: DataRow) -> dict[str, Any]:
    """Return the fields of a row that its prompt keeps. Tests of a code problem may have megabytes."""
    long = {"ground_truth": row.ground_truth, "extra_info": row.extra_info}
    return {"messages": row.messages, **{name: value for name, value in long.items() if is_kept(value)}}


def is_kept(value: Any) -> bool:
    """Return whether a prompt keeps this value of its row."""
    return len(json.dumps(value, default=str)) <= MAX_KEPT_CHARS


async def _found(
    row: DataRow, rewards: AnswerRewards, sandboxes: SandboxSource, seed: int, played: Trajectory
) -> Reward:
    answer = Answer(
        completion_text=played.completion_text,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        extra_info=row.extra_info,
    )
    return await truth_of(answer, rewards, sandboxes, seed=seed)()


async def open_files(config: Config, encode: Encode) -> tuple[TrainingData | None, TrainingData | None]:
    """Training's rows and evaluation's; None where the configuration names no files.

    Raises:
        InputError: a file or a prompt can't be used.
        StorageError: a remote file can't be fetched.
    """

    async def opened(files: tuple[str, ...], *, shuffle: bool) -> TrainingData | None:
        if not files:
            return None
        options = ReadOptions(
            seed=config.run.seed,
            shuffle=shuffle,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            filter_overlong_prompts=config.data.filter_overlong_prompts,
            truncation=config.data.truncation,
        )
        return await open_data(files, options, cache=config.data.cache_dir, encode=encode, check_agent=check_agent_name)

    train = await opened(config.tasks, shuffle=config.data.shuffle)
    return train, await opened(config.eval.tasks, shuffle=False)


def answer_rewards(config: Config) -> AnswerRewards:
    """The section `reward` as the rules take it."""
    section = config.reward
    return AnswerRewards(
        method=section.method,
        format_score=section.format_score,
        correct_score=section.correct_score,
        weights=Weights.of(section),
        code=section.code,
        is_optional=bool(section.judges) and not section.verdict_weight,
        custom=CustomReward(path=section.custom, timeout_s=section.custom_timeout_s) if section.custom else None,
    )


Prompted = tuple[Task, Prompt]


class TaskGroups:
    """Groups of the tasks in `config.tasks`; evaluation takes each of `config.eval.tasks` once, or of these.

    Args:
        train, held_out: tasks, each with its prompt.
        agents: who plays them; None: the policy speaks once.
        max_eval: most tasks to evaluate, from the first; 0: all.
    """

    def __init__(
        self,
        train: Sequence[Prompted],
        held_out: Sequence[Prompted],
        sandboxes: SandboxSource,
        agents: TaskAgents | ExternalAgent | EnvironmentAgents | None = None,
        *,
        max_eval: int = 0,
    ) -> None:
        self._train = train
        # A task that training has twice is evaluated once.
        evaluated = held_out or list({id(task): (task, prompt) for task, prompt in train}.values())
        self._held_out = evaluated[: max_eval or None]
        self._sandboxes = sandboxes
        self._agents = agents

    @property
    def num_eval_prompts(self) -> int:
        return len(self._held_out)

    @property
    def num_train_prompts(self) -> int:
        return len(self._train)

    async def assignment(self, request: GroupRequest, *, seed: int) -> Assignment:
        if request.purpose == "group":
            task, prompt = self._train[prompt_index(request.place, num_prompts=len(self._train), seed=seed)]
        else:
            task, prompt = self._held_out[request.place]

        async def score(played: Trajectory) -> Reward:
            tests = scoring_seed(request.group_id, seed=seed)
            return await task.score(prompt, played.completion_text, self._sandboxes, seed=tests)

        if (agents := self._agents) is None:
            return Assignment(prompt=prompt, play=partial(_one_turn, prompt), truth=score, records_calls=False)
        return Assignment(
            prompt=prompt,
            play=agents.play(task, prompt),
            truth=environment_reward if isinstance(agents, EnvironmentAgents) else score,
            weights=agents.weights if isinstance(agents, TaskAgents) else PLAIN,
        )

    async def close(self) -> None:
        """End what the tools hold."""
        if self._agents is not None:
            await self._agents.close()


async def _one_turn(
    prompt: Prompt, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
) -> Trajectory:
    recorder = Recorder(prompt.token_ids.tolist())
    # The engine's text and not the decoded tokens: those hold the stop text, which is no part of the code.
    completion = await recorder.sample_turn(engine, request_id, sampling, lambda completion: completion.text)
    is_cut = completion.finish_reason == "length"
    return recorder.trajectory(RolloutStatus.TRUNCATED if is_cut else RolloutStatus.COMPLETED)


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
        """Return the assignment of this group.

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
        # Evaluation's samples of one prompt are not compared with each other.
        return replace(assignment, judging=judging, compares=request.purpose == "group" and judging.compares)

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


async def _open(config: Config, sandboxes: SandboxSource) -> Groups:
    if config.uses_data:
        return await DataGroups.open(config, sandboxes)
    # In a thread: an environment may have to be installed, and its process asked.
    train = await asyncio.to_thread(load_tasks, config.tasks)
    held_out = await asyncio.to_thread(load_tasks, config.eval.tasks) if config.eval.tasks else ()
    agents = await _agents(config, sandboxes, (*train, *held_out))
    most = config.eval.max_problems
    if agents is None:
        prompted = prompted_tasks(config, train), prompted_tasks(config, held_out)
        return TaskGroups(*prompted, sandboxes, max_eval=most)
    try:
        prompted = await agents.prompted(train), await agents.prompted(held_out)
        return TaskGroups(*prompted, sandboxes, agents, max_eval=most)
    except BaseException:
        await agents.close()
        raise


async def _agents(
    config: Config, sandboxes: SandboxSource, tasks: Sequence[Task]
) -> TaskAgents | ExternalAgent | EnvironmentAgents | None:
    """Return the players of the tasks; None: the policy speaks once."""
    if plays_environments(tasks):
        return EnvironmentAgents.of(config, sandboxes)
    if config.agent_name == SINGLE_TURN_AGENT:
        return None
    if config.agent_name == EXTERNAL_AGENT:
        return await ExternalAgent.open(config, sandboxes)
    return TaskAgents.of(config, sandboxes)


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Put the source's name in front of UserErrors that the block raises."""
    try:
        yield
    except UserError as error:
        if not source.name:
            raise
        raise type(error)(f"source {source.name}: {error}") from error
