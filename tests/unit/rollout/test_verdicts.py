"""Whatever foreign code raises or returns costs only its own trajectory: the rest of the group keeps its rewards."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rayapp.config.agent import RewardSection
from rayapp.core.errors import (
    ConfigError,
    InputError,
    ProcessDiedError,
    SandboxConfigError,
    SandboxGoneError,
)
from rayapp.core.names import giving
from rayapp.core.types import Prompt, RequestId, Reward, Trajectory
from rayapp.extras.environments.agent import EpisodePlayer, EpisodeTool
from rayapp.extras.environments.files import EnvironmentTask, OpenEnvEnvironment
from rayapp.extras.judges.judging import Judging
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agents import LoopAgent, OneTurn
from rayapp.rollout.problem import (
    VERDICT,
    Agent,
    Problem,
    problem_of_environment,
    problem_of_row,
    problem_of_task,
    prompted,
)
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.custom_rewards import CustomReward
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.verdict import ToolRewards, Weights, verdict
from rayapp.tools.base import ToolBase, ToolOutput, ToolSchema
from support import make


class Unreadable:
    """A number that raises when it is read or shown."""

    def __float__(self) -> float:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")


Act = Callable[[], Any]
"""Raises or returns something hostile."""


def raising(error: BaseException) -> Act:
    def act() -> Any:
        raise error

    return act


def deep() -> Any:
    return deep()


ERRORS: dict[str, Act] = {
    **{
        type(error).__name__: raising(error)
        for error in (
            SandboxGoneError("it died"),
            KeyError("x"),
            UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"),
            TimeoutError(),
            StopIteration(),
            InputError("odd"),
            ConfigError("odd"),
            SystemExit(3),
            asyncio.CancelledError(),
        )
    },
    "RecursionError": deep,
}
VALUES: dict[str, Act] = {
    repr(value): lambda value=value: value for value in (math.nan, math.inf, 1e39, 10**400, None, "1", [1.0])
} | {"unreadable": Unreadable}
HOSTILE = ERRORS | VALUES
MESSAGES = ({"role": "user", "content": "Say something."},)
BAD = 1
"""Place of the trajectory whose policy says "bad"."""


@dataclass(frozen=True)
class OwnTask:
    act: Act
    name: str = "own"

    def render(self, tokenizer: Any) -> Prompt:
        return Prompt(task=self.name, text="say", token_ids=np.array([5], np.int32))

    async def score(self, prompt: Prompt, completion_text: str, sandboxes: Any, *, seed: int) -> Reward:
        if "bad" not in completion_text:
            return Reward(value=1.0, terms={"solved": 1.0})
        found = self.act()
        return found if found is None or isinstance(found, str | list) else Reward(value=found, terms={"own": found})


class Hostile(ToolBase):
    """A tool whose call, or verdict on the trajectory, is hostile for the policy that says "bad"."""

    schema = ToolSchema(name="say", parameters={"type": "object", "properties": {"text": {"type": "string"}}})

    def __init__(self, act: Act, where: str) -> None:
        super().__init__()
        self.act, self.where = act, where

    async def create(self, kwargs: Mapping[str, Any]) -> Any:
        return []

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        state.append(arguments["text"])
        if "bad" in state and self.where == "wait":
            return ToolOutput(text="heard", waited_s=self.act())
        reward = self.act() if "bad" in state and self.where == "call" else 0.5
        return ToolOutput(text="heard", reward=reward)

    async def reward(self, state: Any) -> float | None:
        return self.act() if "bad" in state and self.where == "verdict" else 0.25  # type: ignore[no-any-return]

    async def release(self, state: Any) -> None:
        if self.where == "release" and "bad" in state:
            self.act()


class Judges(Judging):
    """Judges that are hostile about a response that says "bad", alone or beside the others."""

    def __init__(self, act: Act, *, compares: bool) -> None:
        super().__init__({}, RewardSection())
        self.act, self.is_comparing = act, compares

    @property
    def compares(self) -> bool:
        return self.is_comparing

    async def with_scores(self, prompt: Prompt, completion_text: str, verdict: Reward) -> Reward:
        is_hostile = "bad" in completion_text and not self.is_comparing
        return replace(verdict, value=self.act() if is_hostile else 1.0)

    async def with_comparisons(self, prompt: Prompt, texts: Sequence[str], rewards: Sequence[Reward]) -> list[Reward]:
        return [
            replace(reward, value=self.act()) if "bad" in text else reward
            for text, reward in zip(texts, rewards, strict=True)
        ]


class Episode:
    def __init__(self, act: Act, where: str) -> None:
        self.act, self.where, self.is_bad = act, where, False

    async def reset(self, columns: Any) -> ToolOutput:
        return ToolOutput(text="")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        self.is_bad |= arguments["text"] == "bad"
        return ToolOutput(text=self.act() if self.is_bad and self.where == "call" else "heard")

    async def reward(self, task: Any, played: Any) -> dict[str, Any]:
        return {VERDICT: self.act() if self.is_bad and self.where == "verdict" else 1.0}


@dataclass
class Episodes:
    act: Act
    where: str

    async def open(self) -> Sequence[ToolSchema]:
        return [Hostile.schema]

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        yield Episode(self.act, self.where)


@dataclass(frozen=True)
class Asked:
    problem: Problem
    agent: Agent
    judging: Judging | None = None


class Bench:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        chat = make.agent_loop(tokenizer, [Hostile(raising(KeyError()), "nowhere")]).chat
        self.prompt_ids = tuple(chat.prompt_ids(MESSAGES))

    async def task(self, act: Act) -> Asked:
        task = OwnTask(act)
        agent = OneTurn(make.Wordless())
        return Asked(await prompted(problem_of_task(task), agent), agent)

    async def custom(self, act: Act) -> Asked:
        def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
            return act() if "bad" in solution_str else 1.0

        with giving({"python:score": score}):
            custom = CustomReward(path="python:score")
            custom.load()
        return await self.row(AnswerRewards(custom=custom))

    async def row(self, rewards: AnswerRewards, *tools: ToolBase) -> Asked:
        row = DataRow(messages=MESSAGES, data_source="openai/gsm8k", ground_truth="1", prompt_ids=self.prompt_ids)

        async def make_loop(brought: tuple[str, ...]) -> AgentLoop:
            return make.agent_loop(self.tokenizer, tools)

        agent = LoopAgent(make_loop)
        return Asked(await prompted(problem_of_row(row, rewards), agent), agent)

    async def judged(self, act: Act, *, compares: bool) -> Asked:
        return replace(await self.row(AnswerRewards()), judging=Judges(act, compares=compares))

    async def tool(self, act: Act, where: str) -> Asked:
        return await self.row(AnswerRewards(weights=Weights(tool=1.0)), Hostile(act, where))

    async def environment(self, act: Act, where: str) -> Asked:
        environment = OpenEnvEnvironment.model_validate(
            {"name": "e", "folder": ".", "environment": "openenv", "url": "http://e"}
        )
        task = EnvironmentTask(environment=environment, index=0, messages=MESSAGES)
        loop = make.agent_loop(self.tokenizer, [EpisodeTool(Hostile.schema, timeout_s=30.0)])
        player = EpisodePlayer(Episodes(act, where), loop, max_prompt_tokens=1000)
        return Asked(await prompted(problem_of_environment(task), player), player)

    async def play(self, asked: Asked) -> tuple[Trajectory, ...]:
        def said(request_id: RequestId, ids: Sequence[int]) -> str:
            place = request_id.trajectory
            text = "bad" if place == BAD else "good"
            if len(ids) > len(self.prompt_ids) or not self.calls:
                return f"{text}\n#### 1"
            return f"<tool_call>\n{json.dumps({'name': 'say', 'arguments': {'text': text}})}\n</tool_call>"

        engine = make.engine(self.tokenizer, said)
        group, summary = await make.played(
            asked.problem, asked.agent, engine, judging=asked.judging, max_tokens=500, group_size=3
        )
        assert np.isfinite(summary.rewards).all()
        return group.trajectories

    calls = False


KINDS: dict[str, Callable[[Bench, Act], Any]] = {
    "task": Bench.task,
    "custom reward": Bench.custom,
    "judge": partial(Bench.judged, compares=False),
    "tool call": partial(Bench.tool, where="call"),
    "tool wait": partial(Bench.tool, where="wait"),
    "tool verdict": partial(Bench.tool, where="verdict"),
    "tool release": partial(Bench.tool, where="release"),
    "environment call": partial(Bench.environment, where="call"),
    "environment verdict": partial(Bench.environment, where="verdict"),
}
GIVES_TEXT = {"tool call", "tool wait", "tool release", "environment call"}
"""Cases in which the hostile value is a tool's result, which the policy reads: the trajectory may stay valid."""


@pytest.mark.parametrize("kind", KINDS)
async def test_what_code_of_others_raises_or_returns_costs_its_own_trajectory(kind: str, chat_tokenizer: Any) -> None:
    bench = Bench(chat_tokenizer)
    bench.calls = kind.startswith(("tool", "environment"))
    for name, act in HOSTILE.items():
        trajectories = await bench.play(await KINDS[kind](bench, act))
        bad, others = trajectories[BAD], [each for each in trajectories if each is not trajectories[BAD]]
        assert all(each.reward.valid for each in others), (kind, name)
        assert all(math.isfinite(each.reward.value) for each in trajectories), (kind, name)
        if kind not in GIVES_TEXT and not (kind == "tool verdict" and name == "None"):
            assert not bad.reward.valid, (kind, name)
            assert bad.reward.failure_kind, (kind, name)


async def test_judges_that_fail_to_compare_leave_a_group_without_rewards_and_no_error(chat_tokenizer: Any) -> None:
    bench = Bench(chat_tokenizer)
    for act in ERRORS.values():
        trajectories = await bench.play(await bench.judged(act, compares=True))
        assert not any(each.reward.valid for each in trajectories)
    trajectories = await bench.play(await bench.judged(lambda: math.nan, compares=True))
    assert [each.reward.failure_kind for each in trajectories] == ["", "reward_nonsense", ""]


@pytest.mark.parametrize("error", [SandboxConfigError("no key"), ProcessDiedError("the pool is gone")])
async def test_a_configuration_that_can_never_work_and_a_lost_process_leave_the_group(
    error: Exception, chat_tokenizer: Any
) -> None:
    bench = Bench(chat_tokenizer)
    with pytest.raises(type(error)):
        await bench.play(await bench.task(raising(error)))


async def test_a_lost_sandbox_is_named_and_says_nothing_of_the_answer() -> None:
    async def lost() -> Reward:
        raise SandboxGoneError("it died")

    reward = await verdict(lost)
    assert (reward.failure_kind, reward.detail) == ("sandbox_gone", "it died")


async def test_terms_are_added_to_what_a_truth_found_each_by_its_weight() -> None:
    async def found() -> Reward:
        return Reward(value=np.float32(0.5), terms={"format": 1, "note": "text", "none": math.nan})  # type: ignore[arg-type,dict-item]

    weights = Weights(format=0.25, tool=2.0)
    reward = await verdict(found, weights=weights, tools=ToolRewards(calls=1.0, verdicts=0.5))
    assert reward.value == 0.5 + 0.25 + 2.0
    assert reward.terms == {"format": 1.0, "tool": 1.0, "tool_verdict": 0.5}
