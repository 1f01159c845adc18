"""The loops a data row may ask for by its `agent_name`, as in verl: with tools over several turns, or one answer.

    tool_agent           the policy reads the tools, calls them, and speaks again
    single_turn_agent    the policy reads no tools and speaks once; what looks like a call is its answer

Another name is a plug-in's (`rayapp.agents`): it is called with the process's tool agent, whose chat format, tools,
parser and limits it may use, and gives an object with the same `run`.

Made once per rollout worker. Rows say nothing else about how they are played.

`TaskAgents` plays tasks with the tool agent; `TaskGroups` calls it. Tasks that bring the same tools share a loop, whose
prompts list these tools. `prompted_tasks` checks the length of each prompt before anything is sampled.

    task.agent_start() -> messages, files, tools -> AgentLoop -> Trajectory
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from rayapp.config.agent import AGENTS
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.names import is_plugin, load_plugin
from rayapp.core.protocols import AgentTask, RolloutEngine, SandboxSource, Task
from rayapp.core.types import AgentStart, Prompt, RequestId, SamplingParams, Trajectory
from rayapp.rollout.agent.build import open_loop
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.group import Play
from rayapp.rollout.recorder import AgentPrompt
from rayapp.storage.models.tokenizer import load_tokenizer
from rayapp.tasks.verdict import PLAIN, Weights
from rayapp.tools.base import RawCall
from rayapp.tools.toolset import ToolSet

TOOL_AGENT, SINGLE_TURN_AGENT = AGENTS


class Player(Protocol):
    """Plays prompts: `AgentLoop`, or what a plug-in makes of one."""

    async def run(
        self, prompt: AgentPrompt, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        """Play the prompt once; see `AgentLoop.run`."""
        ...


def player_of(agent_name: str, tool_agent: AgentLoop) -> Player:
    """Return the player with this loop's tools: the loop itself, or a plug-in.

    Raises:
        ConfigError: the plug-in can't be made.
    """
    if agent_name == TOOL_AGENT:
        return tool_agent
    try:
        player: Player = load_plugin("agents", agent_name)(tool_agent)
    except ConfigError:
        raise
    except Exception as error:  # boundary: a plug-in is foreign code
        raise ConfigError(f"plug-in {agent_name} can't be made: {type(error).__name__}: {error}") from error
    if not callable(getattr(player, "run", None)):
        raise ConfigError(f"plug-in {agent_name}: what it makes has no `run` (rayapp/rollout/agents.py)")
    return player


class NoCalls:
    """A parser that finds no calls."""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        return ()

    def words(self, text: str) -> str:
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoops:
    """See the module; make one with `agent_loops`."""

    tool_agent: AgentLoop
    single_turn_agent: AgentLoop
    default: str = TOOL_AGENT
    """For rows that name none."""
    _players: dict[str, Player] = field(default_factory=dict, compare=False)
    """Plug-ins by name, made when a row first asks for one."""

    def of(self, agent_name: str) -> AgentLoop:
        """The loop of a row: its chat format, and its tools. A plug-in has those of the tool agent.

        Raises:
            InputError: there is none of that name.
        """
        check_agent_name(agent_name)
        return self.single_turn_agent if (agent_name or self.default) == SINGLE_TURN_AGENT else self.tool_agent

    def player(self, agent_name: str) -> Player:
        """Return the player of a row. Raises as `of`, or ConfigError as `player_of`."""
        loop, name = self.of(agent_name), agent_name or self.default
        if name in AGENTS:
            return loop
        if name not in self._players:
            self._players[name] = player_of(name, loop)
        return self._players[name]

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], agent_name: str = "") -> list[int]:
        """Return a row's prompt as token ids: only the tool agent's prompts list tools."""
        return self.of(agent_name).chat.prompt_ids(messages)

    async def close(self) -> None:
        """End what the tools hold."""
        await self.tool_agent.tools.close()


def agent_loops(tool_agent: AgentLoop, default: str = TOOL_AGENT) -> AgentLoops:
    """Both loops: the one given, and the same without tools and turns."""
    single = AgentLoop(
        chat=tool_agent.chat.without_tools(),
        parser=NoCalls(),
        tools=ToolSet(),
        limits=replace(tool_agent.limits, max_assistant_turns=1),
    )
    return AgentLoops(tool_agent=tool_agent, single_turn_agent=single, default=default)


def check_agent_name(agent_name: str, where: str = "") -> None:
    """Raises InputError for a name that is no loop's."""
    if agent_name and agent_name not in AGENTS and not is_plugin("agents", agent_name):
        at = f"{where}: " if where else ""
        raise InputError(
            f"{at}agent_name {agent_name!r} is no agent loop here; there are {' and '.join(AGENTS)}. Tools of your own "
            "go into agent.tool_file (docs/tools.md)."
        )


def prompted_tasks(config: Config, tasks: Sequence[Task]) -> list[tuple[Task, Prompt]]:
    """The tasks, each with its prompt. Raises InputError as `render_prompts`."""
    return list(zip(tasks, render_prompts(config, tasks), strict=True))


def render_prompts(config: Config, tasks: Sequence[Task]) -> list[Prompt]:
    """One prompt per task, in the order of `config.tasks`.

    Raises:
        InputError: a prompt is longer than rollout.max_prompt_tokens.
    """
    tokenizer = load_tokenizer(config)
    prompts = [task.render(tokenizer) for task in tasks]
    check_length(prompts, config.rollout.max_prompt_tokens)
    return prompts


def check_length(prompts: Sequence[Prompt], limit: int) -> None:
    """Raises InputError for a prompt that is longer than rollout.max_prompt_tokens."""
    for prompt in prompts:
        if prompt.token_ids.size > limit:
            raise InputError(
                f"task {prompt.task!r}: its prompt has {prompt.token_ids.size} tokens, rollout.max_prompt_tokens is "
                f"{limit}. Raise it, or shorten the prompt."
            )


OpenLoop = Callable[[tuple[str, ...]], Awaitable[AgentLoop]]
"""From the tools that a task brings to a loop with them."""


@dataclass(slots=True, eq=False, repr=False)
class TaskAgents:
    """See the module."""

    make_loop: OpenLoop
    """Called once for each set of tools."""
    max_prompt_tokens: int
    """Longer prompts are refused."""
    weights: Weights = PLAIN
    agent: str = TOOL_AGENT
    """Return the player with a loop: the loop itself, or a plug-in."""
    _loops: dict[tuple[str, ...], AgentLoop] = field(default_factory=dict, init=False)
    _players: dict[tuple[str, ...], Player] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, config: Config, sandboxes: SandboxSource) -> TaskAgents:
        """With the run's settings and tool file."""

        async def make_loop(tools: tuple[str, ...]) -> AgentLoop:
            return await open_loop(config, sandboxes, brought=tools)

        return cls(
            make_loop,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            weights=Weights.of(config.reward),
            agent=config.agent_name,
        )

    async def prompted(self, tasks: Sequence[Task]) -> list[tuple[Task, Prompt]]:
        """The tasks, each with the agent's prompt.

        Raises:
            UserError: a task can't be played by an agent, its prompt is too long, or a tool can't be used.
        """
        prompts = [await self._prompt(task) for task in tasks]
        check_length(prompts, self.max_prompt_tokens)
        return list(zip(tasks, prompts, strict=True))

    async def _prompt(self, task: Task) -> Prompt:
        start = agent_start(task)
        if start.tools not in self._loops:
            loop = self._loops[start.tools] = await self.make_loop(start.tools)
            self._players[start.tools] = player_of(self.agent, loop)
        chat = self._loops[start.tools].chat
        return Prompt(
            task=task.name,
            text=chat.render(start.messages),
            token_ids=np.array(chat.prompt_ids(start.messages), np.int32),
            messages=start.messages,
        )

    def play(self, task: Task, prompt: Prompt) -> Play:
        """Return the function that plays a trajectory of one of the tasks of `prompted`."""
        start = agent_start(task)
        begin = AgentPrompt(
            token_ids=tuple(prompt.token_ids.tolist()),
            tools_kwargs=start.tools_kwargs,
            files=start.files,
            packages=start.packages,
            spec=start.spec,
            setup=start.setup,
        )
        return partial(self._players[start.tools].run, begin)

    async def close(self) -> None:
        """End what the tools hold."""
        for loop in self._loops.values():
            await loop.tools.close()


def agent_start(task: Task) -> AgentStart:
    """Return the start of the tool agent in a task.

    Raises:
        InputError: the task can't be played by an agent.
    """
    if not isinstance(task, AgentTask):
        raise InputError(
            f"task {task.name}: agent.name says that an agent plays it, but it has no method agent_start, which "
            "says what one is told and finds (rayapp/core/protocols.py). Use single_turn_agent for it."
        )
    return task.agent_start()
