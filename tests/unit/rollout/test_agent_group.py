"""A group of a data row: episodes of the agent loop scored by verl's rule, with a scripted policy: no model, no Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import DeadlineError, InputError, ToolUnavailableError
from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import Group, GroupSummary, RequestId
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.rollout.agents import LoopAgent
from rayapp.rollout.check import check_inputs, trajectories_at_once
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


async def test_each_episode_is_scored_by_its_last_turn_and_the_tools_rewards_and_its_calls_are_counted(
    chat_tokenizer: Any,
) -> None:
    group, summary = await play(await agent_of(chat_tokenizer, Gsm8kTool()), engine_of(chat_tokenizer))

    # Trajectory 0: right, and its first call, no better than nothing, costs 0.05; the second, right, costs nothing.
    assert summary.rewards.tolist() == pytest.approx([0.95, 0.0, 1.0])
    assert [trajectory.num_turns for trajectory in group.trajectories] == [3, 1, 2]
    assert summary.task == "openai/gsm8k"
    assert group.trajectories[0].completion_text == "It is 4.\n#### 4"
    assert summary.valid.all()
    # The tool's own verdict is 1 where its best call was right: on trajectory 0.
    assert summary.reward_terms["tool_verdict"].tolist() == [1.0, 0.0, 0.0]
    metrics = summarize_step([summary], version=0)
    assert metrics["tool/calls"] == 3  # two by trajectory 0, one by 2
    assert metrics["tool/failed"] == metrics["tool/failed/unknown_tool"] == 1
    assert metrics["turns/mean"] == 2.0
    assert metrics["reward/tool/step_reward/mean"] == pytest.approx(-0.05)
    assert "reward/tool/calls/mean" not in metrics, "a number of calls is no reward"


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


async def test_a_trajectory_without_its_tool_fails_and_still_takes_its_place_in_the_cohort(chat_tokenizer: Any) -> None:
    def hangs(request_id: RequestId, prompt_ids: Sequence[int]) -> str:
        raise DeadlineError("vllm-server-0.generate did not answer within 600 s")

    engine = engine_of(chat_tokenizer, hangs)

    group, summary = await play(await agent_of(chat_tokenizer, Gone()), engine)

    # They are not filed as their server's failure as well.
    assert summary.failure_kinds == ("tool_unavailable",) * 3
    assert [request_id for request_id, _, _ in engine.requests] == [
        RequestId("group", 7, index, turn=0) for index in range(3)
    ]
    assert {sampling.max_tokens for _, _, sampling in engine.requests} == {1}
    assert not any(trajectory.is_trainable for trajectory in group.trajectories)


@pytest.mark.parametrize("which", ["train", "eval"])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"data_source": "hiyouga/geometry3k"}, "data_source 'hiyouga/geometry3k' has no scoring rule in rayapp"),
        (
            {"data_source": "taco", "reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": []}'}},
            "not a code problem: it has 1 inputs and 0 outputs",
        ),
    ],
)
def test_a_row_that_cannot_be_scored_is_told_before_anything_starts(
    tiny_model: Path, tmp_path: Path, which: str, bad: dict[str, Any], why: str
) -> None:
    good = {"prompt": MESSAGES, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "4"}}
    for name, rows in {"good": [good], "bad": [good, good | bad]}.items():
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
    files = {"train": "good", "eval": "good", which: "bad"}
    tasks, evaluated = ([f"{tmp_path}/{files[name]}.parquet"] for name in ("train", "eval"))
    config = make.config(tiny_model, tasks=tasks, eval={"tasks": evaluated})

    with pytest.raises(InputError, match=rf"bad\.parquet, row 1: {why}"):
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
