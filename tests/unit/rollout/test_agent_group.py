"""A group of a data row: episodes of the agent loop scored by verl's rule, with a scripted policy: no model, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import ConfigError, DeadlineError, EngineDeadError, InputError, ToolUnavailableError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import Completion, Group, GroupSummary, RequestId, SamplingParams
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agents import LoopAgent
from rayapp.rollout.check import check_inputs, num_sandboxes, trajectories_at_once
from rayapp.rollout.order import evaluation_waves
from rayapp.rollout.problem import problem_of_row, prompted
from rayapp.runs.tracking.metrics import summarize_step
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.answers import AnswerRewards
from rayapp.tasks.data.data_row import DataRow
from rayapp.tasks.verdict import Weights
from rayapp.testing.engine import ScriptedEngine
from rayapp.tools.base import ToolBase, ToolOutput, ToolSchema
from rayapp.tools.gsm8k import Gsm8kTool
from support import make

CALL = '<tool_call>{"name": "calc_gsm8k_reward", "arguments": {"answer": "%s"}}</tool_call>'
MESSAGES = ({"role": "user", "content": "What is 2 + 2?"},)


class Gone(ToolBase):
    """A tool whose service can't be reached even to begin with."""

    schema = ToolSchema(name="gone")

    async def create(self, kwargs: Mapping[str, Any]) -> None:
        raise ToolUnavailableError("connection refused")

    async def execute(self, state: Any, arguments: Mapping[str, Any]) -> ToolOutput:
        raise AssertionError("it was never made")


def policy(request_id: RequestId, prompt_ids: Sequence[int]) -> str:
    """Trajectory 0 asks the tool twice, then answers; 1 is wrong at once; 2 names a tool that isn't there first."""
    said = {
        0: [CALL % 5, CALL % 4, "It is 4.\n#### 4"],
        1: ["#### 5"],
        2: ['<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "#### 4"],
    }
    return said[request_id.trajectory][request_id.turn]


async def agent_of(tokenizer: Any, *tools: ToolBase, default: str = "tool_agent") -> LoopAgent:
    loop = make.agent_loop(tokenizer, tools)

    async def make_loop(tools: tuple[str, ...]) -> AgentLoop:
        return cast(AgentLoop, loop)

    return await LoopAgent(make_loop, default=default).open()


def engine_of(tokenizer: Any, script: Callable[[RequestId, Sequence[int]], str] = policy) -> ScriptedEngine:
    return make.engine(tokenizer, script)


async def play(
    agent: LoopAgent,
    engine: RolloutEngine,
    *,
    deadline_s: float = 60.0,
    source: str = "openai/gsm8k",
    agent_name: str = "",
    rewards: AnswerRewards = AnswerRewards(weights=Weights(tool=1.0)),  # noqa: B008 - frozen
) -> tuple[Group, GroupSummary]:
    row = DataRow(
        messages=MESSAGES,
        data_source=source,
        agent_name=agent_name,
        ground_truth="4",
        tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}},
        prompt_ids=tuple(agent.prompt_ids(MESSAGES, agent_name)),
    )
    problem = await prompted(problem_of_row(row, rewards), agent)
    return await make.played(problem, agent, engine, group_id=7, group_size=3, deadline_s=deadline_s)


async def test_each_episode_is_scored_by_its_last_turn_and_the_tools_rewards(chat_tokenizer: Any) -> None:
    group, summary = await play(await agent_of(chat_tokenizer, Gsm8kTool()), engine_of(chat_tokenizer))

    # Trajectory 0: right, and its first call, no better than nothing, costs 0.05; the second, right, costs nothing.
    assert summary.rewards.tolist() == pytest.approx([0.95, 0.0, 1.0])
    assert [trajectory.num_turns for trajectory in group.trajectories] == [3, 1, 2]
    assert summary.task == "openai/gsm8k"
    assert group.trajectories[0].completion_text == "It is 4.\n#### 4"
    assert summary.valid.all()


async def test_a_tools_verdict_on_the_trajectory_is_recorded(chat_tokenizer: Any) -> None:
    _, summary = await play(await agent_of(chat_tokenizer, Gsm8kTool()), engine_of(chat_tokenizer))

    # The tool's own verdict is 1 where its best call was right: on trajectory 0.
    assert summary.reward_terms["tool_verdict"].tolist() == [1.0, 0.0, 0.0]


async def test_a_single_turn_row_reads_no_tools_and_its_calls_are_its_answer(chat_tokenizer: Any) -> None:
    agent, engine = await agent_of(chat_tokenizer, Gsm8kTool()), engine_of(chat_tokenizer)

    group, _ = await play(agent, engine, agent_name="single_turn_agent")
    told, _ = await play(agent, engine, agent_name="tool_agent")

    assert [trajectory.num_turns for trajectory in group.trajectories] == [1, 1, 1]
    assert group.trajectories[0].completion_text == CALL % 5
    assert not any(turn.calls for trajectory in group.trajectories for turn in trajectory.turns)
    assert "calc_gsm8k_reward" not in group.prompt.text
    assert "calc_gsm8k_reward" in told.prompt.text


async def test_rows_without_a_name_are_played_as_configured(chat_tokenizer: Any) -> None:
    agent = await agent_of(chat_tokenizer, Gsm8kTool())
    single = await agent_of(chat_tokenizer, Gsm8kTool(), default="single_turn_agent")

    group, _ = await play(single, engine_of(chat_tokenizer))

    assert {trajectory.num_turns for trajectory in group.trajectories} == {1}
    with pytest.raises(InputError, match="agent_name 'react' is neither tool_agent nor single_turn_agent"):
        await play(agent, engine_of(chat_tokenizer), agent_name="react")


async def test_calls_and_failures_are_in_the_metrics_and_not_among_the_rewards(chat_tokenizer: Any) -> None:
    _, summary = await play(await agent_of(chat_tokenizer, Gsm8kTool()), engine_of(chat_tokenizer))

    metrics = summarize_step([summary], version=0)
    assert metrics["tool/calls"] == 3  # two by trajectory 0, one by 2
    assert metrics["tool/failed"] == 1
    assert metrics["tool/failed/unknown_tool"] == 1
    assert metrics["turns/mean"] == 2.0
    assert metrics["reward/tool/step_reward/mean"] == pytest.approx(-0.05)
    assert "reward/tool/calls/mean" not in metrics


async def test_a_trajectory_without_its_tool_fails_and_still_takes_its_place_in_the_cohort(chat_tokenizer: Any) -> None:
    engine = engine_of(chat_tokenizer, lambda request_id, prompt_ids: "#### 4")

    group, summary = await play(await agent_of(chat_tokenizer, Gone()), engine)

    assert summary.failure_kinds == ("tool_unavailable",) * 3
    assert [request_id for request_id, _, _ in engine.requests] == [
        RequestId("group", 7, index, turn=0) for index in range(3)
    ]
    assert {sampling.max_tokens for _, _, sampling in engine.requests} == {1}
    assert not any(trajectory.is_trainable for trajectory in group.trajectories)


@dataclass
class Hanging:
    """Never answers the trajectories in `hang`; a `dead` one answers nobody."""

    inner: ScriptedEngine
    hang: frozenset[int] = frozenset()
    is_dead: bool = False
    asked: list[RequestId] = field(default_factory=list)

    async def generate(
        self, request_id: RequestId, prompt_ids: Sequence[int], sampling: SamplingParams, on_tokens: Any = None
    ) -> Completion:
        self.asked.append(request_id)
        if self.is_dead:
            raise EngineDeadError("gone")
        if request_id.trajectory in self.hang:
            await asyncio.Event().wait()
        return await self.inner.generate(request_id, prompt_ids, sampling)


async def test_the_deadline_costs_a_trajectory_and_not_its_group(chat_tokenizer: Any) -> None:
    engine = Hanging(engine_of(chat_tokenizer), hang=frozenset({1}))

    _, summary = await play(await agent_of(chat_tokenizer, Gsm8kTool()), engine, deadline_s=2.0)

    assert summary.failure_kinds == ("", "deadline", "")
    # The hanging one requested its first turn: no other request is made for it.
    assert engine.asked.count(RequestId("group", 7, 1, turn=0)) == 1


def hangs(request_id: RequestId, prompt_ids: Sequence[int]) -> str:
    """A script of a server that does not answer."""
    raise DeadlineError("vllm-server-0.generate did not answer within 600 s")


async def test_a_trajectory_without_its_tool_is_not_filed_as_its_servers_failure_as_well(chat_tokenizer: Any) -> None:
    _, summary = await play(await agent_of(chat_tokenizer, Gone()), engine_of(chat_tokenizer, hangs))

    assert summary.failure_kinds == ("tool_unavailable",) * 3


@pytest.mark.parametrize("which", ["train", "eval"])
def test_a_row_that_cannot_be_scored_is_told_before_anything_starts(
    tiny_model: Path, tmp_path: Path, which: str
) -> None:
    def row(source: str) -> dict[str, Any]:
        return {"prompt": MESSAGES, "data_source": source, "reward_model": {"ground_truth": "4"}}

    for name, sources in {"good": ["openai/gsm8k"], "bad": ["openai/gsm8k", "hiyouga/geometry3k"]}.items():
        pq.write_table(pa.Table.from_pylist(list(map(row, sources))), tmp_path / f"{name}.parquet")
    files = {"train": "good", "eval": "good", which: "bad"}
    tasks, evaluated = ([f"{tmp_path}/{files[name]}.parquet"] for name in ("train", "eval"))
    config = make.config(tiny_model, tasks=tasks, eval={"tasks": evaluated})

    with pytest.raises(
        InputError, match=r"bad\.parquet, row 1: data_source 'hiyouga/geometry3k' has no scoring rule in rayapp"
    ) as caught:
        check_inputs(config, training=True)

    assert "reward.custom" in str(caught.value)


def test_a_row_that_is_no_code_problem_is_told_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    def row(truth: str) -> dict[str, Any]:
        return {"prompt": MESSAGES, "data_source": "taco", "reward_model": {"ground_truth": truth}}

    rows = [row('{"inputs": ["1"], "outputs": ["2"]}'), row('{"inputs": ["1"], "outputs": []}')]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    config = make.config(tiny_model, tasks=[f"{tmp_path}/bad.parquet"])

    with pytest.raises(InputError, match=r"bad\.parquet, row 1: not a code problem: it has 1 inputs and 0 outputs"):
        check_inputs(config, training=True)


async def test_a_group_of_a_code_row_is_scored_in_sandboxes(chat_tokenizer: Any) -> None:
    agent = await agent_of(chat_tokenizer)
    row = DataRow(
        messages=MESSAGES,
        data_source="taco",
        ground_truth='{"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}',
        prompt_ids=tuple(agent.prompt_ids(MESSAGES)),
    )
    said = ["```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(3)\n```", "I don't know."]
    engine = engine_of(chat_tokenizer, lambda request_id, _: said[request_id.trajectory])

    async with open_pool(SandboxConfig(), "code-row") as (sandboxes, _):
        problem = await prompted(problem_of_row(row, AnswerRewards(weights=Weights(format=0.5))), agent)
        _, summary = await make.played(problem, agent, engine, sandboxes=sandboxes, group_size=3)

    assert summary.rewards.tolist() == [1.5, 0.5, 0.0]
    assert summary.reward_statuses == ("scored", "scored", "syntax_error")
    assert summary.reward_terms["solved"].tolist() == [1.0, 0.0, 0.0]


def test_requests_sort_by_number_and_their_text_names_what_is_known() -> None:
    early, late = RequestId("group", 9, 2, turn=10), RequestId("group", 10, 0)
    assert sorted([late, early, early._replace(turn=9)]) == [early._replace(turn=9), early, late]
    assert (str(early), str(late)) == ("group=9/trajectory=2/turn=10", "group=10/trajectory=0")
    assert str(early._replace(side=3, turn=1)) == "group=9/trajectory=2/side=3/turn=1"


def test_only_first_turns_belong_to_a_cohort() -> None:
    assert RequestId("group", 7, 1).is_first_turn
    assert RequestId("group", 7, 1, turn=0).is_first_turn
    assert not RequestId("group", 7, 1, turn=10).is_first_turn


def config_of(*overrides: str) -> Config:
    return load_config(None, ["tasks=[a.parquet]", "eval.tasks=[b.parquet]", *overrides])


def test_an_evaluation_runs_in_waves_no_larger_than_a_training_step() -> None:
    config = config_of("train.groups_per_step=2", "rollout.group_size=4", "eval.samples_per_task=3")

    def waves(number: int) -> list[tuple[int, ...]]:
        return evaluation_waves(number, config.rollout, config.train.groups_per_step, config.eval.samples_per_task)

    # 8 trajectories at once are 2 prompts of 3 samples.
    assert waves(5) == [(0, 1), (2, 3), (4,)]
    assert waves(0) == []


def test_trajectories_at_once_are_told_with_their_arithmetic() -> None:
    sync = config_of("train.groups_per_step=2", "rollout.group_size=4", "eval.samples_per_task=2")
    ahead = config_of(
        "train.groups_per_step=2",
        "rollout.group_size=4",
        "eval.samples_per_task=2",
        "eval.every_steps=1",
        "train.max_staleness=1",
    )

    assert trajectories_at_once(sync, training=True)[0] == 8
    assert trajectories_at_once(sync, training=False)[0] == 4 * 2  # rows that fit beside each other x samples
    assert trajectories_at_once(ahead, training=True)[0] == 16 + 8  # two steps in flight, and an evaluation beside them


def test_sandboxes_are_what_the_pool_lends_at_once() -> None:
    own = config_of("sandbox.providers=[{type: local, max_sandboxes: 6}]").sandbox
    limited = config_of("sandbox.providers=[{type: local, max_sandboxes: 6}]", "sandbox.max_leases=4").sandbox

    assert (num_sandboxes(own), num_sandboxes(limited)) == (6, 4)


def test_too_few_sandboxes_for_a_stateful_interpreter_are_told_before_anything_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools:\n  - class_name: rayapp.tools.coding.PythonTool\n")
    config = config_of(
        f"model.path={tiny_model}",
        f"agent.tool_file={tools}",
        "rollout.group_size=4",
        "rollout.max_prompt_tokens=100",
        "rollout.max_completion_tokens=100",
        "sandbox.max_leases=5",
    )

    with pytest.raises(ConfigError, match=r"allow 5 sandboxes, .* 8 trajectories run at once .*group_size 4") as caught:
        check_inputs(config, training=True)

    assert "max_leases to 8" in str(caught.value)
