"""Agents that play rows of environments, and the environments' rewards. Each source has one agent.

    trl, openenv    one episode per trajectory: reset -> the agent loop with the episode's tools -> its reward
    verifiers       a process that plays the row through the gateway, as an external agent, and sends the reward

If an environment fails, dies or does not answer, the trajectory fails and has no reward.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rayapp.config.agent import AgentSection
from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, InputError, ToolUnavailableError
from rayapp.core.protocols import RolloutEngine, SandboxSource, Task
from rayapp.core.types import Media, Prompt, RequestId, RolloutStatus, SamplingParams, Trajectory
from rayapp.extras.environments.files import (
    AnyEnvironment,
    Columns,
    EnvironmentTask,
    Message,
    OpenEnvEnvironment,
    TrlEnvironment,
    VerifiersEnvironment,
)
from rayapp.extras.environments.openenv import OpenEnvEpisodes
from rayapp.extras.environments.trl import TrlEpisodes
from rayapp.extras.environments.verifiers import VerifiersProcess
from rayapp.rollout.agent.build import open_loop
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agent.text import readable
from rayapp.rollout.external_agent import ExternalAgent
from rayapp.rollout.external_program import AgentCall
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.gateway.limits import SessionLimits
from rayapp.rollout.problem import VERDICT, Agent, Problem
from rayapp.rollout.recorder import AgentPrompt, Recorder, failed
from rayapp.storage.media import by_sha256, pictured
from rayapp.tasks.data.pictures import placed
from rayapp.tools.base import RawCall, Tool, ToolBase, ToolCallParser, ToolContext, ToolOutput, ToolSchema


class Episode(Protocol):
    """One trajectory's instance of an environment. All methods raise ToolFailedError for a mistake of the policy, which
    reads the message, and ToolUnavailableError if the environment is lost."""

    async def reset(self, columns: Columns) -> ToolOutput:
        """Begin the episode, and return the first message, which is appended to the prompt. It may be empty."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput: ...

    async def reward(self, task: EnvironmentTask, played: Trajectory) -> Mapping[str, float]:
        """Return the reward by the name VERDICT, and its parts by names of their own."""
        ...


class Episodes(Protocol):
    """Makes the episodes of one environment."""

    async def open(self) -> Sequence[ToolSchema]:
        """Return the policy's tools, which all trajectories share. Raises ConfigError."""
        ...

    def episode(self) -> AbstractAsyncContextManager[Episode]:
        """Return a context manager with a new episode. Raises ToolUnavailableError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTurn:
    """A `ToolCallParser` that reads each turn as one call, whose only argument is the whole text of the turn."""

    tool: str
    argument: str

    @property
    def start(self) -> str:
        return ""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        return (RawCall(name=self.tool, arguments=json.dumps({self.argument: text.strip()})),)

    def words(self, text: str) -> str:
        return ""


class EpisodeTool(ToolBase):
    """One tool of an environment, whose state is the trajectory's episode. The agent loop enforces `timeout_s`, which
    is longer than the episode's own deadline."""

    ends_episode = True  # run calls in the last turn too: they may change the reward

    def __init__(self, schema: ToolSchema, *, timeout_s: float) -> None:
        super().__init__({}, schema, ToolContext(environ={}))
        self.timeout_s = timeout_s

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        return kwargs["episode"]

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        episode: Episode = state
        return await episode.call(self.schema.name, arguments)


# Function of an environment's tools, and of a parser if the policy doesn't write tool calls.
OpenLoop = Callable[[Sequence[Tool], ToolCallParser | None], Awaitable[AgentLoop]]


class EpisodePlayer:
    """Agent that plays an environment's rows with the agent loop."""

    def __init__(self, episodes: Episodes, loop: AgentLoop, *, max_prompt_tokens: int) -> None:
        self._episodes, self._loop, self._max_prompt_tokens = episodes, loop, max_prompt_tokens
        self._tools = [
            schema.name for schema in loop.tools.schemas if isinstance(loop.tools.get(schema.name), EpisodeTool)
        ]

    async def prompt(self, problem: Problem) -> Prompt:
        """Return the prompt without token ids: `play` appends the environment's first message."""
        messages = problem.start.messages
        return replace(problem.prompt, text=self._loop.chat.render(messages), messages=messages)

    async def play(
        self, problem: Problem, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        task = row_of(problem)
        played = Recorder(self._loop.chat.prompt_ids(task.messages)).trajectory()
        try:
            async with self._episodes.episode() as episode:
                observation = await episode.reset(task.columns)
                pictures = by_sha256(observation.pictures)
                ids, media = await self._prompt_ids(task, observation.text, pictures)
                prompt = AgentPrompt(
                    token_ids=tuple(ids),
                    media=media,
                    pictures=pictures,
                    tools_kwargs={name: {"create_kwargs": {"episode": episode}} for name in self._tools},
                    first_turn=1,  # `group._CohortPlace.fill` has sent a request as turn 0 of this trajectory
                )
                played = await self._loop.run(prompt, engine=engine, sampling=sampling, request_id=request_id)
                if played.status.is_error:
                    return played
                rewards = await episode.reward(task, played)
        except ToolUnavailableError as error:
            return _failed(played, RolloutStatus.ERROR_TOOL, error)
        except InputError as error:
            return _failed(played, RolloutStatus.ERROR_TASK, error)
        return replace(played, tool_rewards={**played.tool_rewards, **rewards})

    async def _prompt_ids(
        self, task: EnvironmentTask, observation: str, pictures: Mapping[str, bytes]
    ) -> tuple[list[int], Media]:
        # Neutralize control tokens: an environment's text is as untrusted as a tool's result.
        told = self._loop.chat.harmless({"role": "user", "content": readable(observation)})["content"]
        ids = self._loop.chat.prompt_ids(_followed_by(task.messages, told, len(pictures)))
        ids, media = await placed(self._loop.pictures, ids, list(pictures), pictures)
        if len(ids) > self._max_prompt_tokens:
            raise InputError(
                f"row {task.index}: the prompt with the environment's first message has {len(ids)} tokens, but "
                f"rollout.max_prompt_tokens is {self._max_prompt_tokens}. Raise rollout.max_prompt_tokens"
            )
        return ids, media

    async def close(self) -> None:
        await self._loop.tools.close()


class VerifiersPlayer:
    """Agent that lets the environment's own process play its rows, through the gateway."""

    def __init__(self, environment: VerifiersEnvironment, agent: ExternalAgent) -> None:
        self._process, self._agent = VerifiersProcess(environment), agent

    async def prompt(self, problem: Problem) -> Prompt:
        return await self._agent.prompt(problem)

    async def play(self, problem: Problem, **asked: Any) -> Trajectory:
        task = row_of(problem)
        found: dict[str, float] = {}

        async def entry(call: AgentCall) -> None:
            found.update(
                await self._process.play(task.index, url=call.openai_base_url, key=call.api_key, model=call.model)
            )

        played = await self._agent.play(problem, **asked, entry=entry)
        verdict = found.pop("reward", None)
        return played if verdict is None else replace(played, tool_rewards={**found, VERDICT: verdict})

    async def close(self) -> None:
        await self._process.close()
        await self._agent.close()


class EnvironmentAgents:
    """Agent for all environments of a source, which opens one at its first row.

    Args:
        section, max_prompt_tokens: of the source.
        make_agent: makes the external agent of an environment that needs the gateway, given a trajectory's seconds.
    """

    def __init__(
        self,
        section: AgentSection,
        max_prompt_tokens: int,
        make_loop: OpenLoop,
        make_agent: Callable[[float], Awaitable[ExternalAgent]],
    ) -> None:
        self._section, self._max_prompt_tokens = section, max_prompt_tokens
        self._make_loop, self._make_agent = make_loop, make_agent
        self._players: dict[int, Agent] = {}
        self._kept: list[AnyEnvironment] = []

    @classmethod
    def of(cls, config: Config, sandboxes: SandboxSource) -> EnvironmentAgents:
        async def make_loop(tools: Sequence[Tool], reader: ToolCallParser | None) -> AgentLoop:
            limit = config.rollout.max_completion_tokens
            return await open_loop(config.model, config.agent, limit, sandboxes, made=tools, reader=reader)

        async def make_agent(timeout_s: float) -> ExternalAgent:
            section = config.agent.external.model_copy(update={"timeout_s": timeout_s})
            limits = SessionLimits(max_tokens=config.max_model_tokens, max_turns=config.agent.max_assistant_turns)
            formats = await asyncio.to_thread(Formats.of, config.model, config.agent)
            return await ExternalAgent(section, limits, formats, None).started()

        return cls(config.agent, config.rollout.max_prompt_tokens, make_loop, make_agent)

    async def prompt(self, problem: Problem) -> Prompt:
        """Return a row's prompt. Raises UserError: the environment can't be used."""
        return await (await self._player(row_of(problem).environment)).prompt(problem)

    async def play(self, problem: Problem, **asked: Any) -> Trajectory:
        """Play a row after `prompt`, which opens the environment."""
        return await self._players[id(row_of(problem).environment)].play(problem, **asked)

    async def close(self) -> None:
        await asyncio.gather(*(player.close() for player in self._players.values()))

    async def _player(self, environment: AnyEnvironment) -> Agent:
        if id(environment) not in self._players:
            self._players[id(environment)] = await self._opened(environment)
            self._kept.append(environment)
        return self._players[id(environment)]

    async def _opened(self, environment: AnyEnvironment) -> Agent:
        if isinstance(environment, VerifiersEnvironment):
            return VerifiersPlayer(environment, await self._make_agent(environment.timeout_s))
        episodes = await asyncio.to_thread(episodes_of, environment)
        # Allow for all calls of a turn, which run one after the other, each with the environment's own deadline.
        timeout_s = self._section.max_calls_per_turn * environment.timeout_s + 5.0
        tools = [EpisodeTool(schema, timeout_s=timeout_s) for schema in await episodes.open()]
        field = environment.text_field if isinstance(environment, OpenEnvEnvironment) else ""
        if field and self._section.tool_file:
            raise ConfigError(
                f"task {environment.name}: text_field and agent.tool_file {self._section.tool_file} can't be "
                "combined: with text_field every turn is an action, so the policy can't call tools. Leave out "
                "text_field or agent.tool_file"
            )
        reader = WholeTurn(tool=tools[0].schema.name, argument=field) if field else None
        loop = await self._make_loop(tools, reader)
        return EpisodePlayer(episodes, loop, max_prompt_tokens=self._max_prompt_tokens)


def row_of(problem: Problem) -> EnvironmentTask:
    assert isinstance(problem.task, EnvironmentTask), (
        "plays_environments has checked that the task is a row of an environment"
    )
    return problem.task


def episodes_of(environment: TrlEnvironment | OpenEnvEnvironment) -> Episodes:
    """Return the maker of an environment's episodes. Raises ConfigError: its class can't be found."""
    return TrlEpisodes(environment) if isinstance(environment, TrlEnvironment) else OpenEnvEpisodes(environment)


def check_environments(tasks: Sequence[Task]) -> bool:
    """Check that each environment answers; those of verifiers did when they listed rows. Return True if a prompt lists
    tools. Raises UserError."""
    found = {id(task.environment): task.environment for task in tasks if isinstance(task, EnvironmentTask)}

    async def check() -> bool:
        lists_tools = False
        for environment in found.values():
            if isinstance(environment, VerifiersEnvironment):
                continue
            has_tools = bool(await episodes_of(environment).open())
            lists_tools |= has_tools and not getattr(environment, "text_field", "")
        return lists_tools

    return asyncio.run(check())


def _followed_by(messages: Sequence[Message], observation: str, num_pictures: int) -> list[dict[str, Any]]:
    """Append the environment's first message to the last message, as TRL does."""
    *before, last = messages
    return [*map(dict, before), {**last, "content": pictured(f"{last['content']}{observation}", num_pictures)}]


def _failed(played: Trajectory, status: RolloutStatus, error: Exception) -> Trajectory:
    return failed(played, status, f"{type(error).__name__}: {error}"[:500])
