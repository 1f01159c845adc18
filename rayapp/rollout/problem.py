"""`Problem`, the form in which rollouts get every task and every row of data, and `Agent`, which plays problems.

Task | DataRow -> Problem --Agent.prompt--> its prompt --Agent.play--> Trajectory --Problem.score--> Reward
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from rayapp.core.errors import InputError
from rayapp.core.protocols import AgentTask, EnvironmentRow, RolloutEngine, SandboxSource, Task
from rayapp.core.types import AgentStart, Prompt, RequestId, Reward, SamplingParams, Trajectory
from rayapp.tasks.answers import Answer, AnswerRewards, scorer_of
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.verdict import PLAIN, Weights

MAX_KEPT_CHARS = 1 << 16
VERDICT = "environment"
"""Key of an environment's reward in `Trajectory.tool_rewards`."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One task or row of data, with its prompt and the function that scores its trajectories."""

    prompt: Prompt
    """Prompt of all trajectories, which is recorded with the group. Its text is empty until an agent has rendered the
    prompt."""
    score: Callable[[Problem, Trajectory, SandboxSource, int], Awaitable[Reward]]
    """Function that scores a trajectory that did not fail. Its last argument is the seed that draws the hidden tests.
    It may raise any exception, which `tasks.verdict` handles."""
    weights: Weights | None = PLAIN
    """Weights of the terms that are added to rewards; None if rewards get no terms for tools and turns."""
    agent_start: AgentStart | None = None
    """Messages, files and tools with which an agent starts; None takes those of the task."""
    task: Task | None = None
    """Task of this problem; None for a row of data."""
    agent_name: str = ""
    """Name of the agent that the row of data names; empty for the source's agent."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """SHA-256 -> encoded bytes of the prompt's pictures."""

    @cached_property
    def start(self) -> AgentStart:
        """Messages, files and tools with which an agent starts.

        Raises:
            InputError: the task can't be played by an agent.
        """
        if self.agent_start is not None:
            return self.agent_start
        assert self.task is not None, "a problem needs a task or an agent_start"
        return agent_start(self.task)


class Agent(Protocol):
    """Plays problems. Callers have to set deadlines."""

    async def prompt(self, problem: Problem) -> Prompt:
        """Return the prompt that the policy reads. It has no token ids if the agent writes its prompts while it plays.

        Raises:
            UserError: the agent can't play the problem, or one of its tools can't be used.
        """
        ...

    async def play(
        self, problem: Problem, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        """Play a problem once. The problem's `prompt` must come from this agent's method `prompt`."""
        ...

    async def close(self) -> None: ...


async def prompted(problem: Problem, agent: Agent) -> Problem:
    """Return the problem, with the prompt that the agent renders. Raises UserError: the agent can't play the
    problem.
    """
    return replace(problem, prompt=await agent.prompt(problem))


def problem_of_task(task: Task, weights: Weights | None = None) -> Problem:
    return Problem(prompt=bare_prompt(task.name), score=_score_task, weights=weights, task=task)


async def _score_task(problem: Problem, played: Trajectory, sandboxes: SandboxSource, seed: int) -> Reward:
    assert problem.task is not None
    return await problem.task.score(problem.prompt, played.completion_text, sandboxes, seed=seed)


def agent_start(task: Task) -> AgentStart:
    """Return the messages, files and tools with which an agent starts on a task.

    Raises:
        InputError: the task can't be played by an agent.
    """
    if not isinstance(task, AgentTask):
        raise InputError(
            f"task {task.name}: its class has no method agent_start (rayapp/core/protocols.py), so agents can't play "
            "it. Add the method, or set agent.name to single_turn_agent"
        )
    return task.agent_start()


def problem_of_row(row: DataRow, rewards: AnswerRewards) -> Problem:
    """Return the problem of a row of data. Its name is the row's data source.

    Raises:
        InputError: no rule or reward function scores this data source.
    """
    rewards.truth_kind(row.data_source)

    async def score(problem: Problem, played: Trajectory, sandboxes: SandboxSource, seed: int) -> Reward:
        return await scorer_of(Answer.of(row, played.completion_text), rewards, sandboxes, seed=seed)()

    # Leave long values out of the prompt, because the tests of a code problem may have megabytes.
    long = {"ground_truth": row.ground_truth, "extra_info": row.extra_info}
    kept = {name: value for name, value in long.items() if is_kept(value)}
    return Problem(
        prompt=bare_prompt(row.data_source, row.prompt_ids, media=row.media, **kept),
        score=score,
        weights=rewards.weights,
        agent_start=AgentStart(messages=row.messages, tools_kwargs=row.tools_kwargs),
        agent_name=row.agent_name,
        pictures=row.pictures,
    )


def is_kept(value: Any) -> bool:
    """Return True if this value of a row is short enough to be kept in its prompt."""
    return len(json.dumps(value, default=str)) <= MAX_KEPT_CHARS


def problem_of_environment(task: EnvironmentRow) -> Problem:
    """Return the problem of a row. The environment itself scores the problem's trajectories."""
    start = AgentStart(messages=task.messages)
    return Problem(prompt=bare_prompt(task.name), score=score_by_environment, task=task, agent_start=start)


async def score_by_environment(problem: Problem, played: Trajectory, sandboxes: SandboxSource, seed: int) -> Reward:
    """Return the reward that the environment gave to the trajectory; an invalid reward if it gave none."""
    value = played.tool_rewards.get(VERDICT)
    if value is None:
        return Reward.invalid("no_verdict", f"the environment returned no reward: {played.status}")
    return Reward(value=value, terms={"solved": float(value >= 1.0)})


def plays_environments(tasks: Sequence[Task]) -> bool:
    """Return True if these tasks are rows of environments.

    Raises:
        InputError: only some of the tasks are.
    """
    names = {isinstance(task, EnvironmentRow): task.name for task in tasks}
    if len(names) > 1:
        raise InputError(
            f"task {names[True]} is an environment and task {names[False]} is not: a source can't play both kinds. "
            "Give each its own source (docs/tasks.md#mix-sources)"
        )
    return True in names


def bare_prompt(name: str, token_ids: Sequence[int] = (), **kept: Any) -> Prompt:
    """Return a prompt without text, which an agent still has to render. The prompts of rows of data already have token
    ids.
    """
    return Prompt(task=name, text="", token_ids=np.array(token_ids, np.int32), **kept)
