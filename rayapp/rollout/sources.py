"""The sources of a run, in a rollout worker: their problems, agents and judges, and the source of each group.

Each rollout worker opens the sources once, at its start, and then reports unusable files, templates and tool services.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from rayapp.config.agent import EXTERNAL_AGENT, RewardSection
from rayapp.config.config import Config, Source, sources_of
from rayapp.core.errors import UserError
from rayapp.core.http import server_named
from rayapp.core.names import load_extra
from rayapp.core.protocols import EnvironmentRow, SandboxSource, Task
from rayapp.core.types import Prompt
from rayapp.rollout.agents import SINGLE_TURN_AGENT, LoopAgent, OneTurn, check_agent_name, check_length
from rayapp.rollout.external_agent import ExternalAgent
from rayapp.rollout.order import GroupRequest, Mixing, prompt_index
from rayapp.rollout.problem import (
    Agent,
    Problem,
    plays_environments,
    problem_of_environment,
    problem_of_row,
    problem_of_task,
    prompted,
)
from rayapp.storage.models.fetch import with_local_model
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.data.pictures import picture_rows
from rayapp.tasks.data.reading import Encode, ReadOptions, TrainingData, open_data
from rayapp.tasks.loading import load_tasks
from rayapp.tasks.verdict import PLAIN, Judges, Judging, Weights


class ProblemSet(Protocol):
    """The problems of one source. Which problem a group gets depends only on the seed and the request's `place`."""

    @property
    def num_eval(self) -> int:
        """Number of problems in one evaluation, of which a request with purpose `eval` has `place`."""
        ...

    async def problem(self, request: GroupRequest, *, seed: int) -> Problem:
        """Return the problem of a group, with its prompt. The request's `place` counts only groups of this source."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class RowFiles:
    """Rows of data files. Training group N gets row N of the run's order, on whichever worker it runs."""

    agent: Agent
    rewards: AnswerRewards
    train: TrainingData | None
    held_out: TrainingData | None
    max_eval: int = 0  # rows, from the first on; 0: all
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @property
    def num_eval(self) -> int:
        if self.held_out is None:
            return 0
        return min(len(self.held_out), self.max_eval or len(self.held_out))

    async def problem(self, request: GroupRequest, *, seed: int) -> Problem:
        rows = self.train if request.purpose == "group" else self.held_out
        assert rows is not None, "a source without training files: the driver should have refused this command"
        # Read one problem at a time: otherwise two groups that need the same window of rows would both load it.
        async with self._reading:
            row = await asyncio.to_thread(rows.row, request.place)
        return await prompted(problem_of_row(row, self.rewards), self.agent)


class Listed:
    """Tasks with their prompts, for training (`train`) and evaluation (`held_out`; without them each training task
    once). `max_eval`: tasks to evaluate, from the first on; 0: all."""

    def __init__(
        self,
        train: Sequence[tuple[Task, Prompt]],
        held_out: Sequence[tuple[Task, Prompt]] = (),
        *,
        problem_of: Callable[[Task], Problem] = problem_of_task,
        max_eval: int = 0,
    ) -> None:
        self._train = train
        # Evaluate a task once, even if training lists it twice.
        evaluated = held_out or list({id(task): (task, prompt) for task, prompt in train}.values())
        self._held_out = evaluated[: max_eval or None]
        self._problem_of = problem_of

    @classmethod
    async def open(
        cls,
        agent: Agent,
        train: Sequence[Task],
        held_out: Sequence[Task],
        *,
        weights: Weights,
        max_prompt_tokens: int,
        max_eval: int,
    ) -> Listed:
        """Make the set with the prompts that the agent renders. UserError: a task can't be played."""

        def problem_of(task: Task) -> Problem:
            if isinstance(task, EnvironmentRow):
                return problem_of_environment(task)
            return problem_of_task(task, None if isinstance(agent, OneTurn) else weights)

        async def with_prompts(tasks: Sequence[Task]) -> list[tuple[Task, Prompt]]:
            prompts = [await agent.prompt(problem_of(task)) for task in tasks]
            check_length(prompts, max_prompt_tokens)
            return list(zip(tasks, prompts, strict=True))

        return cls(await with_prompts(train), await with_prompts(held_out), problem_of=problem_of, max_eval=max_eval)

    @property
    def num_eval(self) -> int:
        return len(self._held_out)

    async def problem(self, request: GroupRequest, *, seed: int) -> Problem:
        if request.purpose == "group":
            task, prompt = self._train[prompt_index(request.place, num_prompts=len(self._train), seed=seed)]
        else:
            task, prompt = self._held_out[request.place]
        return replace(self._problem_of(task), prompt=prompt)


async def open_files(config: Config, encode: Encode) -> tuple[TrainingData | None, TrainingData | None]:
    """Open the data files of training and of evaluation; None if the configuration names no files for it."""

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
        return await open_data(
            files,
            options,
            cache=config.data.cache_dir,
            encode=encode,
            check_agent=check_agent_name,
            pictures=pictures,
        )

    pictures = await asyncio.to_thread(picture_rows, config.model, config.data)
    train = await opened(config.tasks, shuffle=config.data.shuffle)
    return train, await opened(config.eval.tasks, shuffle=False)


def answer_rewards(section: RewardSection) -> AnswerRewards:
    return AnswerRewards(
        method=section.method,
        weights=Weights.of(section),
        code=section.code,
        reads_thoughts=section.reads_thoughts,
        is_optional=bool(section.judges) and not section.verdict_weight,
        custom=CustomReward(path=section.custom) if section.custom else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSource:
    """One source of a run, with its problems, agent and judges."""

    config: Config  # the source's own settings replace those of the run
    problems: ProblemSet
    agent: Agent
    name: str = ""
    judging: Judging | None = None

    async def problem(self, request: GroupRequest, *, seed: int) -> Problem:
        found = await self.problems.problem(request, seed=seed)
        return replace(found, prompt=replace(found.prompt, source=self.name))


class Sources:
    """All sources of a run, and the choice of each group's source by `ratios` and `seed`."""

    def __init__(self, ratios: Sequence[float], *, seed: int, judges: Judges | None = None) -> None:
        self.opened: list[OpenSource] = []
        self._judges = judges
        self._mixing = Mixing(ratios, seed=seed)

    @property
    def num_eval_prompts(self) -> tuple[int, ...]:
        """Prompts of each source in one evaluation. The ids of groups with purpose `eval` count through all sources."""
        return tuple(source.problems.num_eval for source in self.opened)

    def of(self, request: GroupRequest) -> tuple[OpenSource, GroupRequest]:
        """Return the source of a group, and the request with the group's index among the groups of this source."""
        index, place = self._place(request)
        return self.opened[index], replace(request, prompt=place)

    def _place(self, request: GroupRequest) -> tuple[int, int]:
        if request.purpose == "eval":
            starts = list(accumulate(self.num_eval_prompts, initial=0))
            index = bisect_right(starts, request.group_id) - 1
            return index, request.group_id - starts[index]
        return self._mixing.place(request.group_id)

    async def close(self) -> None:
        """Close the agents and judges of all sources, even if closing one of them fails."""
        closing = [source.agent.close() for source in self.opened]
        if self._judges is not None:
            closing.append(self._judges.close())
        ended = await asyncio.gather(*closing, return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error


async def open_sources(config: Config, sandboxes: SandboxSource) -> Sources:
    """Open the sources of a run. A UserError begins with the source's name."""
    config = await asyncio.to_thread(with_local_model, config)
    own, judges = sources_of(config), open_judges(config)
    sources = Sources([source.ratio for source in own], seed=config.run.seed, judges=judges)
    try:
        if judges is not None:
            await judges.check()  # check the judges before any prompt is sampled
        for source in own:
            with naming(source):
                opened = await (_open_rows if source.config.uses_data else _open_tasks)(source.config, sandboxes)
            judging = judges.of(source.config.reward) if judges is not None else None
            sources.opened.append(replace(opened, name=source.name, judging=judging))
    except BaseException:
        await sources.close()
        raise
    return sources


def open_judges(config: Config, *, of_run: bool = True) -> Judges | None:
    """Make the judges of a rollout worker, with those on the run's own servers if `of_run`; None without any.
    ConfigError: a key's environment variable is not set."""
    names = {name for source in sources_of(config) for name in source.config.reward.judges}
    used = [each for each in config.judges if each.name in names and (of_run or not server_named(each.base_url))]
    if not used:
        return None
    judges: Judges = load_extra("judges.judging:Judges")(used, num_sharing=config.rollout.num_workers)
    return judges


async def _open_rows(config: Config, sandboxes: SandboxSource) -> OpenSource:
    rewards = answer_rewards(config.reward)
    if rewards.custom is not None:
        # Load the user's function in a thread: its imports may take seconds, which would block the event loop.
        await asyncio.to_thread(rewards.custom.load)
    agent: ExternalAgent | LoopAgent = (
        await ExternalAgent.open(config, sandboxes)
        if config.agent_name == EXTERNAL_AGENT
        else await LoopAgent.of(config, sandboxes).open()
    )
    try:
        train, held_out = await open_files(config, agent.prompt_ids)
    except BaseException:
        await agent.close()
        raise
    rows = RowFiles(agent, rewards, train=train, held_out=held_out, max_eval=config.eval.max_problems)
    return OpenSource(config=config, problems=rows, agent=agent)


async def _open_tasks(config: Config, sandboxes: SandboxSource) -> OpenSource:
    # Load tasks in a thread: an environment may have to be installed, and its process started.
    train = await asyncio.to_thread(load_tasks, config.tasks)
    held_out = await asyncio.to_thread(load_tasks, config.eval.tasks) if config.eval.tasks else ()
    agent = await _agent_of_tasks(config, sandboxes, (*train, *held_out))
    try:
        tasks = await Listed.open(
            agent,
            train,
            held_out,
            weights=Weights.of(config.reward) if isinstance(agent, LoopAgent) else PLAIN,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_eval=config.eval.max_problems,
        )
    except BaseException:
        await agent.close()
        raise
    return OpenSource(config=config, problems=tasks, agent=agent)


async def _agent_of_tasks(config: Config, sandboxes: SandboxSource, tasks: Sequence[Task]) -> Agent:
    if plays_environments(tasks):
        agents: Agent = load_extra("environments.agent:EnvironmentAgents").of(config, sandboxes)
        return agents
    if config.agent_name == SINGLE_TURN_AGENT:
        return OneTurn(load_tokenizer(config.model, config.agent.chat_template_kwargs))
    if config.agent_name == EXTERNAL_AGENT:
        return await ExternalAgent.open(config, sandboxes)
    return LoopAgent.of(config, sandboxes)


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Put the source's name in front of the message of a UserError."""
    try:
        yield
    except UserError as error:
        if not source.name:
            raise
        raise type(error)(f"source {source.name}: {error}") from error
