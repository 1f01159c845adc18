"""What a group plays: a problem, which every task and every row of data becomes, and the agent that plays it.

Task | DataRow -> Problem --Agent.prompt--> its prompt --Agent.play--> Trajectory --Problem.score--> Reward
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from rayapp.core.errors import InputError
from rayapp.core.protocols import AgentTask, RolloutEngine, SandboxSource, Task
from rayapp.core.types import AgentStart, Prompt, RequestId, Reward, SamplingParams, Trajectory
from rayapp.tasks.answers import Answer, AnswerRewards, scorer_of
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.verdict import PLAIN, Weights

MAX_KEPT_CHARS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is asked, with its truth."""

    prompt: Prompt
    """Prompt of all trajectories; the group records it. Until an agent has rendered it, it holds no text."""
    score: Callable[[Problem, Trajectory, SandboxSource, int], Awaitable[Reward]]
    """Scores a trajectory that did not fail, with the seed of hidden tests. May raise anything: see `verdict`."""
    weights: Weights | None = PLAIN
    """None: its rewards have no terms of tools and turns."""
    agent_start: AgentStart | None = None
    """Start of an agent; None: the task says it."""
    task: Task | None = None
    """Task that this is; None: a row of data."""
    agent_name: str = ""
    """Agent that the row of data names; empty: the source's."""

    @cached_property
    def start(self) -> AgentStart:
        """Messages, files and tools that an agent starts with.

        Raises:
            InputError: the task can't be played by an agent.
        """
        if self.agent_start is not None:
            return self.agent_start
        assert self.task is not None, "a problem has a task or an agent_start"
        return agent_start(self.task)


class Agent(Protocol):
    """Plays problems, without a deadline of its own."""

    async def prompt(self, problem: Problem) -> Prompt:
        """Return the problem's prompt as the policy reads it; without token ids if the agent writes it while it plays.

        Raises:
            UserError: the agent can't play the problem, or one of its tools can't be used.
        """
        ...

    async def play(
        self, problem: Problem, *, engine: RolloutEngine, sampling: SamplingParams, request_id: RequestId
    ) -> Trajectory:
        """Play a problem, whose prompt is that of `prompt`, once."""
        ...

    async def close(self) -> None: ...


async def prompted(problem: Problem, agent: Agent) -> Problem:
    """Return the problem with the prompt that the agent gives it. Raises UserError as `Agent.prompt`."""
    return replace(problem, prompt=await agent.prompt(problem))


def problem_of_task(task: Task, weights: Weights | None = None) -> Problem:
    return Problem(prompt=bare_prompt(task.name), score=_score_task, weights=weights, task=task)


async def _score_task(problem: Problem, played: Trajectory, sandboxes: SandboxSource, seed: int) -> Reward:
    assert problem.task is not None
    return await problem.task.score(problem.prompt, played.completion_text, sandboxes, seed=seed)


def agent_start(task: Task) -> AgentStart:
    """Return the start of an agent in a task.

    Raises:
        InputError: the task can't be played by an agent.
    """
    if not isinstance(task, AgentTask):
        raise InputError(
            f"task {task.name}: agent.name says that an agent plays it, but it has no method agent_start, which "
            "says what one is told and finds (rayapp/core/protocols.py). Use single_turn_agent for it."
        )
    return task.agent_start()


def problem_of_row(row: DataRow, rewards: AnswerRewards) -> Problem:
    """Return the problem of a row; its name is the row's data source.

    Raises:
        InputError: nothing can score the data source.
    """
    rewards.truth_kind(row.data_source)

    async def score(problem: Problem, played: Trajectory, sandboxes: SandboxSource, seed: int) -> Reward:
        return await scorer_of(Answer.of(row, played.completion_text), rewards, sandboxes, seed=seed)()

    # Tests of a code problem may have megabytes.
    long = {"ground_truth": row.ground_truth, "extra_info": row.extra_info}
    kept = {name: value for name, value in long.items() if is_kept(value)}
    return Problem(
        prompt=bare_prompt(row.data_source, row.prompt_ids, **kept),
        score=score,
        weights=rewards.weights,
        agent_start=AgentStart(messages=row.messages, tools_kwargs=row.tools_kwargs),
        agent_name=row.agent_name,
    )


def is_kept(value: Any) -> bool:
    """Return whether a prompt keeps this value of its row."""
    return len(json.dumps(value, default=str)) <= MAX_KEPT_CHARS


def bare_prompt(name: str, token_ids: Sequence[int] = (), **kept: Any) -> Prompt:
    """Return a prompt that an agent has not rendered yet; the token ids are those of a row of data."""
    return Prompt(task=name, text="", token_ids=np.array(token_ids, np.int32), **kept)
