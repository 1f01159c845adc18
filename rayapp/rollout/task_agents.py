"""The tool agent over tasks: what it reads and finds, how it plays, and what its answer and its calls are worth.

    task.agent_start() -> messages, files, tools -> AgentLoop -> Episode -> its answer alone -> task.score

Called by `TaskGroups`. Tasks that bring the same tools share a loop, whose prompts tell of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.core.protocols import AgentTask, SandboxSource, Task
from rayapp.core.types import AgentStart, Prompt, Reward
from rayapp.rollout.agent.build import open_loop
from rayapp.rollout.agent.episode import AgentPrompt, Episode
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agent.loops import TOOL_AGENT, Player, player_of
from rayapp.rollout.agent.outcome import tool_reward, tool_verdict, with_terms
from rayapp.rollout.group import Play
from rayapp.rollout.prompts import check_length

OpenLoop = Callable[[tuple[str, ...]], Awaitable[AgentLoop]]
"""From the tools that a task brings to a loop with them."""


@dataclass(slots=True, eq=False, repr=False)
class TaskAgents:
    """See the module."""

    make_loop: OpenLoop
    """Called once for each set of tools."""
    max_prompt_tokens: int
    """Longer prompts are refused."""
    tool_weight: float
    """Of the sum of what tools gave for single calls."""
    tool_verdict_weight: float = 0.0
    """Of the sum of their verdicts on whole trajectories."""
    agent: str = TOOL_AGENT
    """Who plays with a loop: itself, or a plug-in."""
    _loops: dict[tuple[str, ...], AgentLoop] = field(default_factory=dict, init=False)
    _players: dict[tuple[str, ...], Player] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, config: Config, sandboxes: SandboxSource) -> TaskAgents:
        """With the run's settings and tool file."""

        async def make_loop(tools: tuple[str, ...]) -> AgentLoop:
            return await open_loop(config, sandboxes, brought=tools)

        limit, reward = config.rollout.max_prompt_tokens, config.reward
        return cls(
            make_loop,
            max_prompt_tokens=limit,
            tool_weight=reward.tool_weight,
            tool_verdict_weight=reward.tool_verdict_weight,
            agent=config.default_agent,
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
        """How a trajectory of one of the tasks of `prompted` is played."""
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

    async def score(self, episode: Episode, verdict: Callable[[], Awaitable[Reward]]) -> Reward:
        """The verdict on the answer, with what the calls gave; none on an episode that failed."""
        if episode.status.is_error:
            return with_terms(None, episode)
        reward, terms = await verdict(), {"tool": tool_reward(episode), "tool_verdict": tool_verdict(episode)}
        if reward.valid:
            value = reward.value + self.tool_weight * terms["tool"]
            value += self.tool_verdict_weight * terms["tool_verdict"]
            reward = replace(reward, value=value, terms={**reward.terms, **terms})
        return with_terms(reward, episode)

    async def close(self) -> None:
        """End what the tools hold."""
        for loop in self._loops.values():
            await loop.tools.close()


def agent_start(task: Task) -> AgentStart:
    """Where the tool agent begins a task.

    Raises:
        InputError: the task can't be played by an agent.
    """
    if not isinstance(task, AgentTask):
        raise InputError(
            f"task {task.name}: agent.task_agent says that an agent plays it, but it has no method agent_start, which "
            "says what one is told and finds (rayapp/core/protocols.py). Use single_turn_agent for it."
        )
    return task.agent_start()
