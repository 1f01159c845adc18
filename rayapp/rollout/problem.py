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
from rayapp.tasks.data.pictures import as_marks
from rayapp.tasks.verdict import PLAIN, Weights

MAX_KEPT_CHARS = 1 << 16
VERDICT = "environment"  # an environment's reward in `Trajectory.tool_rewards`


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One task or row of data, with its prompt and the function that scores its trajectories."""

    prompt: Prompt  # of all trajectories; its text is empty until an agent has rendered it
    # Function that scores a trajectory that did not fail; the last argument draws the hidden tests; may raise anything.
    score: Callable[[Problem, Trajectory, SandboxSource, int], Awaitable[Reward]]
    weights: Weights | None = PLAIN  # of the terms added to rewards; None: no terms for tools and turns
    agent_start: AgentStart | None = None  # None takes that of the task
    task: Task | None = None  # None for a row of data
    agent_name: str = ""  # named by the row; empty for the source's agent
    # SHA-256 -> encoded bytes of the prompt's pictures.
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    shown: tuple[str, ...] = ()  # SHA-256 of a row's pictures, in the order of their places

    @cached_property
    def start(self) -> AgentStart:
        """Messages, files and tools with which an agent starts."""
        if self.agent_start is not None:
            return self.agent_start
        assert self.task is not None, "a problem needs a task or an agent_start"
        return agent_start(self.task)


class Agent(Protocol):
    """Plays problems. Callers have to set deadlines."""

    async def prompt(self, problem: Problem) -> Prompt:
        """Return the prompt that the policy reads. It has no ids if the agent writes prompts while it plays."""
        ...

    async def play(
        self, problem: Problem, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        """Play a problem once. The problem's `prompt` must come from this agent's method `prompt`."""
        ...

    async def close(self) -> None: ...


async def prompted(problem: Problem, agent: Agent) -> Problem:
    return replace(problem, prompt=await agent.prompt(problem))


def problem_of_task(task: Task, weights: Weights | None = None) -> Problem:
    return Problem(prompt=bare_prompt(task.name), score=_score_task, weights=weights, task=task)


async def _score_task(problem: Problem, played: Trajectory, sandboxes: SandboxSource, seed: int) -> Reward:
    assert problem.task is not None
    return await problem.task.score(problem.prompt, played.completion_text, sandboxes, seed=seed)


def agent_start(task: Task) -> AgentStart:
    if not isinstance(task, AgentTask):
        raise InputError(
            f"task {task.name}: its class has no method agent_start (rayapp/core/protocols.py), so agents can't play "
            "it. Add the method, or set agent.name to single_turn_agent"
        )
    return task.agent_start()


def problem_of_row(row: DataRow, rewards: AnswerRewards) -> Problem:
    """Return the problem of a row of data. Its name is the row's data source."""
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
        agent_start=AgentStart(
            messages=as_marks(row.messages) if row.media else row.messages, tools_kwargs=row.tools_kwargs
        ),
        agent_name=row.agent_name,
        pictures=row.pictures,
        shown=tuple(each.sha256 for each in row.media),
    )


def is_kept(value: Any) -> bool:
    """True if this value of a row is short enough to be kept in its prompt."""
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
    """True if these tasks are rows of environments. InputError: only some are."""
    names = {isinstance(task, EnvironmentRow): task.name for task in tasks}
    if len(names) > 1:
        raise InputError(
            f"task {names[True]} is an environment and task {names[False]} is not: a source can't play both kinds. "
            "Give each its own source (docs/tasks.md#mix-sources)"
        )
    return True in names


def bare_prompt(name: str, token_ids: Sequence[int] = (), **kept: Any) -> Prompt:
    """Return a prompt without text, which an agent still has to render."""
    return Prompt(task=name, text="", token_ids=np.array(token_ids, np.int32), **kept)
