"""Players of environments' rows, and the environments' rewards. One player per source.

    trl, openenv    a scene for each trajectory, reset -> the agent loop, whose tools are the scene's -> its reward
    verifiers       a process that plays the row against the gateway, as an external agent, and sends the reward

If an environment fails, dies or does not answer, the trajectory fails and has no reward. Called by `run_group`.

A scene is one trajectory's instance of an environment: it is reset once, tools change it, and it gives the reward at
the end.

Stage (one for a source)  --scene()-->  Scene: reset -> observation;  call, call, …;  reward
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rayapp.config.config import Config, with_values
from rayapp.core.errors import ConfigError, InputError, ToolUnavailableError
from rayapp.core.protocols import RolloutEngine, SandboxSource, Task
from rayapp.core.types import AgentStart, Prompt, RequestId, Reward, RolloutStatus, SamplingParams, Trajectory
from rayapp.rollout.agent.build import open_loop
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agent.text import readable
from rayapp.rollout.environments.openenv import OpenEnvStage
from rayapp.rollout.environments.trl import TrlStage
from rayapp.rollout.external_agent import ExternalAgent
from rayapp.rollout.external_program import AgentCall
from rayapp.rollout.gateway.formats import Formats
from rayapp.rollout.problem import Agent, Problem, bare_prompt
from rayapp.rollout.recorder import AgentPrompt, Recorder, failed
from rayapp.tasks.environments.files import (
    AnyEnvironment,
    Columns,
    EnvironmentTask,
    Message,
    OpenEnvEnvironment,
    TrlEnvironment,
    VerifiersEnvironment,
)
from rayapp.tasks.environments.verifiers import VerifiersProcess
from rayapp.tools.base import RawCall, Tool, ToolBase, ToolCallParser, ToolContext, ToolOutput, ToolSchema


class Scene(Protocol):
    """One trajectory's environment. Raises ToolFailedError for mistakes of the policy.

    Raises, from any method:
        ToolUnavailableError: the environment is lost.
    """

    async def reset(self, columns: Columns) -> str:
        """Return the environment's first message, appended to the prompt; may be empty."""
        ...

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput: ...

    async def reward(self, task: EnvironmentTask, played: Trajectory) -> float: ...


class Stage(Protocol):
    """Makes scenes."""

    async def open(self) -> Sequence[ToolSchema]:
        """Return the policy's tools, the same for all trajectories.

        Raises:
            ConfigError: the environment can't be used.
        """
        ...

    def scene(self) -> AbstractAsyncContextManager[Scene]:
        """Return a new scene. Raises ToolUnavailableError: none is available."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeTurn:
    """Reads a whole turn as the only argument of one tool call. See `ToolCallParser`."""

    tool: str
    argument: str

    @property
    def start(self) -> str:
        return ""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        return (RawCall(name=self.tool, arguments=json.dumps({self.argument: text.strip()})),)

    def words(self, text: str) -> str:
        return ""


class SceneTool(ToolBase):
    """One tool of a scene. Its state is the trajectory's scene.

    Args:
        timeout_s: the loop's deadline; the scene's own deadline comes first.
    """

    ends_episode = True  # its effect in the last turn counts, too

    def __init__(self, schema: ToolSchema, *, timeout_s: float) -> None:
        super().__init__({}, schema, ToolContext(environ={}))
        self.timeout_s = timeout_s

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        return kwargs["scene"]

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        scene: Scene = state
        return await scene.call(self.schema.name, arguments)


log = logging.getLogger(__name__)
VERDICT = "environment"
"""Name of the environment's verdict, among `Trajectory.tool_rewards`."""
OpenLoop = Callable[[Sequence[Tool], ToolCallParser | None], Awaitable[AgentLoop]]
"""Function that makes a loop from an environment's tools and, if turns are no calls, their reader."""


class ScenePlayer:
    """Plays rows with the agent loop."""

    def __init__(self, stage: Stage, loop: AgentLoop, *, max_prompt_tokens: int) -> None:
        self._stage, self._loop, self._max_prompt_tokens = stage, loop, max_prompt_tokens
        self._tools = [
            schema.name for schema in loop.tools.schemas if isinstance(loop.tools.get(schema.name), SceneTool)
        ]

    async def prompt(self, problem: Problem) -> Prompt:
        """Return the prompt, without token ids: the environment's first message is still to be appended."""
        messages = problem.start.messages
        return replace(problem.prompt, text=self._loop.chat.render(messages), messages=messages)

    async def play(
        self, problem: Problem, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        task = row_of(problem)
        played = Recorder(self._loop.chat.prompt_ids(task.messages)).trajectory()
        try:
            async with self._stage.scene() as scene:
                observation = await scene.reset(task.columns)
                prompt = AgentPrompt(
                    token_ids=self._prompt_ids(task, observation),
                    tools_kwargs={name: {"create_kwargs": {"scene": scene}} for name in self._tools},
                    first_turn=1,  # turn 0 took the trajectory's place in its cohort
                )
                played = await self._loop.run(prompt, engine=engine, sampling=sampling, request_id=request_id)
                if played.status.is_error:
                    return played
                verdict = await scene.reward(task, played)
        except ToolUnavailableError as error:
            return _failed(played, RolloutStatus.ERROR_TOOL, error)
        except InputError as error:
            return _failed(played, RolloutStatus.ERROR_TASK, error)
        return replace(played, tool_rewards={**played.tool_rewards, VERDICT: verdict})

    def _prompt_ids(self, task: EnvironmentTask, observation: str) -> tuple[int, ...]:
        # Text of an environment is as untrusted as a tool's result.
        told = self._loop.chat.harmless({"role": "user", "content": readable(observation)})["content"]
        ids = self._loop.chat.prompt_ids(_followed_by(task.messages, told))
        if len(ids) > self._max_prompt_tokens:
            raise InputError(
                f"row {task.index}: the prompt and what the environment says first have {len(ids)} tokens, "
                f"rollout.max_prompt_tokens is {self._max_prompt_tokens}"
            )
        return tuple(ids)

    async def close(self) -> None:
        await self._loop.tools.close()


class VerifiersPlayer:
    """Plays rows in the environment's own process, through the gateway."""

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
    """See the module. `close` it.

    Args:
        config: config of the source.
        make_loop: see `OpenLoop`.
        make_agent: makes the gateway for an environment that needs one, given a trajectory's time limit in seconds.
    """

    def __init__(
        self, config: Config, make_loop: OpenLoop, make_agent: Callable[[float], Awaitable[ExternalAgent]]
    ) -> None:
        self._config, self._make_loop, self._make_agent = config, make_loop, make_agent
        self._players: dict[int, Agent] = {}
        self._kept: list[AnyEnvironment] = []

    @classmethod
    def of(cls, config: Config, sandboxes: SandboxSource) -> EnvironmentAgents:
        """Make it with the run's settings and tool file."""

        async def make_loop(tools: Sequence[Tool], reader: ToolCallParser | None) -> AgentLoop:
            return await open_loop(config, sandboxes, made=tools, reader=reader)

        async def make_agent(timeout_s: float) -> ExternalAgent:
            section = config.agent.external.model_copy(update={"timeout_s": timeout_s})
            own = with_values(config, agent={"external": section})
            return await ExternalAgent(own, await asyncio.to_thread(Formats.of, own), None).started()

        return cls(config, make_loop, make_agent)

    async def prompt(self, problem: Problem) -> Prompt:
        """See `Agent.prompt`. Raises UserError: the environment can't be used."""
        return await (await self._player(row_of(problem).environment)).prompt(problem)

    async def play(self, problem: Problem, **asked: Any) -> Trajectory:
        """Play a row of an environment for which `prompt` was called."""
        return await self._players[id(row_of(problem).environment)].play(problem, **asked)

    async def close(self) -> None:
        """End all environments."""
        await asyncio.gather(*(player.close() for player in self._players.values()))

    async def _player(self, environment: AnyEnvironment) -> Agent:
        if id(environment) not in self._players:
            self._players[id(environment)] = await self._opened(environment)
            self._kept.append(environment)
        return self._players[id(environment)]

    async def _opened(self, environment: AnyEnvironment) -> Agent:
        if isinstance(environment, VerifiersEnvironment):
            return VerifiersPlayer(environment, await self._make_agent(environment.timeout_s))
        stage = await asyncio.to_thread(stage_of, environment)
        # Calls wait for each other, and the environment's own deadlines come first.
        timeout_s = self._config.agent.max_calls_per_turn * environment.timeout_s + 5.0
        tools = [SceneTool(schema, timeout_s=timeout_s) for schema in await stage.open()]
        field = environment.text_field if isinstance(environment, OpenEnvEnvironment) else ""
        if field and self._config.agent.tool_file:
            raise ConfigError(
                f"task {environment.name}: with text_field every turn is an action: it can't call the tools of "
                f"agent.tool_file {self._config.agent.tool_file}. Leave one of them out"
            )
        reader = WholeTurn(tool=tools[0].schema.name, argument=field) if field else None
        loop = await self._make_loop(tools, reader)
        return ScenePlayer(stage, loop, max_prompt_tokens=self._config.rollout.max_prompt_tokens)


def row_of(problem: Problem) -> EnvironmentTask:
    """Return the environment's row for this problem."""
    assert isinstance(problem.task, EnvironmentTask), "plays_environments has looked"
    return problem.task


def problem_of_environment(task: EnvironmentTask) -> Problem:
    """Return the problem of a row, which the environment scores itself."""
    opening = AgentStart(messages=task.messages)
    return Problem(prompt=bare_prompt(task.name), truth=environment_truth, task=task, opening=opening)


async def environment_truth(problem: Problem, played: Trajectory, sandboxes: SandboxSource, seed: int) -> Reward:
    """Return the environment's own reward; an invalid one if it gave none."""
    value = played.tool_rewards.get(VERDICT)
    if value is None:
        return Reward.invalid("no_verdict", f"the environment gave none: {played.status}")
    return Reward(value=value, terms={"solved": float(value >= 1.0)})


def stage_of(environment: TrlEnvironment | OpenEnvEnvironment) -> Stage:
    """Return the stage of an environment. Raises ConfigError: its class can't be found."""
    return TrlStage(environment) if isinstance(environment, TrlEnvironment) else OpenEnvStage(environment)


def plays_environments(tasks: Sequence[Task]) -> bool:
    """Return True if these tasks are rows of environments.

    Raises:
        InputError: only some of them are.
    """
    names = {isinstance(task, EnvironmentTask): task.name for task in tasks}
    if len(names) > 1:
        raise InputError(
            f"{names[True]} is an environment and {names[False]} is none: they are played in different ways. Give each "
            "a source of its own (docs/tasks.md#mix-sources)"
        )
    return True in names


def check_environments(tasks: Sequence[Task]) -> None:
    """Check that each environment answers, before anything starts. Verifiers' environments have answered: they listed
    their rows.

    Raises:
        UserError: an environment does not answer.
    """
    found = {id(task.environment): task.environment for task in tasks if isinstance(task, EnvironmentTask)}

    async def check() -> None:
        for environment in found.values():
            if isinstance(environment, VerifiersEnvironment):
                continue
            stage = stage_of(environment)
            await stage.open()
            if isinstance(stage, OpenEnvStage) and await stage.holds_one_session():
                log.warning(
                    "task %s: the OpenEnv server %s holds one session at once: trajectories wait for each other "
                    "(raise max_concurrent_envs in its create_app)", environment.name, stage.environment.url,
                )  # fmt: skip

    asyncio.run(check())


def _followed_by(messages: Sequence[Message], observation: str) -> list[Message]:
    """Return the messages with the environment's first message appended to the last one, as in TRL."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{observation}"}]


def _failed(played: Trajectory, status: RolloutStatus, error: Exception) -> Trajectory:
    return failed(played, status, f"{type(error).__name__}: {error}"[:500])
