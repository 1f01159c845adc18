"""Where a rollout worker's groups come from: coding tasks, or rows of data with the agent loop. One of the two per run.

    open_groups(config, sandboxes) -> TaskGroups | DataGroups     .run(request, …) -> (Group, GroupSummary)

Called by the rollout worker once; what can't work (a file, a template, a tool's service) is told here, at the start.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from rayapp.config.config import Config
from rayapp.core.protocols import RolloutEngine, SandboxSource, Task
from rayapp.core.types import Group, GroupSummary, Prompt, SamplingParams
from rayapp.rollout.agent.build import open_agent_loop
from rayapp.rollout.agent.episode import AgentLimits
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agent.loops import AgentLoops, agent_loops, check_agent_name
from rayapp.rollout.agent_group import AgentWork, run_agent_group
from rayapp.rollout.group import run_group
from rayapp.rollout.order import GroupRequest, prompt_index
from rayapp.rollout.prompts import render_prompts
from rayapp.storage.models.prefetch import with_local_model
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.data.reading import Encode, ReadOptions, TrainingData, open_data
from rayapp.tasks.loading import load_tasks
from rayapp.tools.base import ToolContext


class Groups(Protocol):
    """See the module."""

    @property
    def num_eval_prompts(self) -> int:
        """Prompts of one evaluation; a request of purpose `eval` names one by its group_id."""
        ...

    @property
    def num_train_prompts(self) -> int:
        """Prompts of one epoch of training."""
        ...

    async def run(
        self, request: GroupRequest, *, engine: RolloutEngine, sampling: SamplingParams, group_size: int, seed: int
    ) -> tuple[Group, GroupSummary]: ...

    async def close(self) -> None: ...


async def open_groups(config: Config, sandboxes: SandboxSource) -> Groups:
    """The groups of a run.

    Raises:
        UserError: a task, a file, the chat template or a tool can't be used.
    """
    config = await asyncio.to_thread(with_local_model, config)
    if config.uses_data:
        return await DataGroups.open(config, sandboxes)
    tasks = load_tasks(config.tasks)
    return TaskGroups(config, tasks, render_prompts(config, tasks), sandboxes)


class TaskGroups:
    """Groups of the tasks in `config.tasks`; evaluation takes each task once."""

    def __init__(
        self, config: Config, tasks: tuple[Task, ...], prompts: list[Prompt], sandboxes: SandboxSource
    ) -> None:
        self._config = config
        self._tasks = tasks
        self._prompts = prompts
        self._sandboxes = sandboxes

    @property
    def num_eval_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_train_prompts(self) -> int:
        return len(self._prompts)

    async def run(
        self, request: GroupRequest, *, engine: RolloutEngine, sampling: SamplingParams, group_size: int, seed: int
    ) -> tuple[Group, GroupSummary]:
        index = request.place
        if request.purpose == "group":
            index = prompt_index(index, num_prompts=len(self._prompts), seed=seed)
        return await run_group(
            request,
            task=self._tasks[index],
            prompt=self._prompts[index],
            engine=engine,
            sandboxes=self._sandboxes,
            sampling=sampling,
            group_size=group_size,
            seed=seed,
            deadline_s=self._config.rollout.group_deadline_s,
        )

    async def close(self) -> None:
        """Nothing is held."""


class DataGroups:
    """Groups of data rows; group N of the training is row N of the run, whatever worker it is on."""

    def __init__(
        self,
        config: Config,
        loops: AgentLoops,
        rewards: AnswerRewards,
        *,
        train: TrainingData | None,
        held_out: TrainingData | None,
    ) -> None:
        self._config = config
        self._loops = loops
        self._rewards = rewards
        self._train = train
        self._held_out = held_out
        self._reading = asyncio.Lock()

    @classmethod
    async def open(cls, config: Config, sandboxes: SandboxSource) -> DataGroups:
        """See `open_groups`."""
        rewards = answer_rewards(config)
        if rewards.custom is not None:
            # Its imports may take seconds, which would hold up every trajectory of this process.
            await asyncio.to_thread(rewards.custom.load)
        loops = agent_loops(await _open_loop(config, sandboxes), config.agent.default_agent)
        try:
            train, held_out = await open_files(config, loops.prompt_ids)
        except BaseException:
            await loops.close()
            raise
        return cls(config, loops, rewards, train=train, held_out=held_out)

    @property
    def num_eval_prompts(self) -> int:
        if self._held_out is None:
            return 0
        return min(len(self._held_out), self._config.data.max_eval_rows or len(self._held_out))

    @property
    def num_train_prompts(self) -> int:
        return len(self._train) if self._train is not None else 0

    async def run(
        self, request: GroupRequest, *, engine: RolloutEngine, sampling: SamplingParams, group_size: int, seed: int
    ) -> tuple[Group, GroupSummary]:
        work = AgentWork(
            loops=self._loops, rewards=self._rewards, deadline_s=self._config.rollout.group_deadline_s, seed=seed
        )
        row = await self._row(request)
        return await run_agent_group(request, row, work, engine=engine, sampling=sampling, group_size=group_size)

    async def _row(self, request: GroupRequest) -> DataRow:
        rows = self._train if request.purpose == "group" else self._held_out
        assert rows is not None, "the driver checks which files a command needs"
        # One at a time: two groups that reach a new window of rows together would both load it.
        async with self._reading:
            return await asyncio.to_thread(rows.row, request.place)

    async def close(self) -> None:
        """End what the tools hold."""
        await self._loops.close()


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

    train = await opened(config.data.train_files, shuffle=config.data.shuffle)
    return train, await opened(config.data.eval_files, shuffle=False)


def answer_rewards(config: Config) -> AnswerRewards:
    """The section `reward` as the rules take it."""
    section = config.reward
    return AnswerRewards(
        method=section.method,
        format_score=section.format_score,
        correct_score=section.correct_score,
        format_weight=section.format_weight,
        tool_weight=section.tool_weight,
        custom=CustomReward(path=section.custom, timeout_s=section.custom_timeout_s) if section.custom else None,
    )


async def _open_loop(config: Config, sandboxes: SandboxSource) -> AgentLoop:
    agent = config.agent
    limits = AgentLimits(
        max_response_tokens=config.rollout.max_completion_tokens,
        max_assistant_turns=agent.max_assistant_turns,
        max_calls_per_turn=agent.max_calls_per_turn,
        max_tool_output_chars=agent.max_tool_output_chars,
        cut_side=agent.tool_output_keeps,
    )
    tokenizer: Any = load_tokenizer(config)
    return await open_agent_loop(
        tokenizer,
        limits=limits,
        model=config.model.path,
        tool_file=agent.tool_file,
        parser=agent.tool_parser,
        chat_template=agent.chat_template,
        context=ToolContext(sandboxes=sandboxes),
    )
