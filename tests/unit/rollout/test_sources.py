"""Several sources in one run: the order follows from seed and id alone, and a single source is as it always was."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rayapp.config.config import Config
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.types import Prompt, Trajectory
from rayapp.rollout.check import check_inputs
from rayapp.rollout.group import reward_of
from rayapp.rollout.order import (
    ANY_VERSION,
    GroupRequest,
    Mixing,
    evaluation_seed,
    prompt_index,
    sampling_seed,
    scoring_seed,
)
from rayapp.rollout.recorder import Recorder
from rayapp.rollout.sources import Sources, open_sources
from rayapp.sandbox.pool.build import open_pool
from rayapp.tasks.data.reading import ReadOptions, open_data
from support.stubs.judge_stub import JudgeStub

RATIOS = st.lists(st.floats(0.001, 100.0) | st.integers(1, 9), min_size=1, max_size=7)
SEEDS = st.integers(0, 2**31 - 1)


def turns(ratios: Sequence[float], seed: int, ids: range) -> list[int]:
    mixing = Mixing(ratios, seed=seed)
    return [mixing.place(group_id)[0] for group_id in ids]


@given(RATIOS, SEEDS, st.integers(0, 5000))
@settings(max_examples=40)
@example([1, 1, 1], 0, 0)
@example([0.7, 0.2, 0.1], 3, 77)
def test_any_hundred_groups_in_a_row_are_within_one_of_the_ratios(ratios: list[float], seed: int, start: int) -> None:
    found = turns(ratios, seed, range(start, start + 250))

    for first in range(150):
        window = found[first : first + 100]
        for source, ratio in enumerate(ratios):
            assert abs(window.count(source) - 100 * ratio / sum(ratios)) < 1 + 1e-9


@given(RATIOS, SEEDS)
@settings(max_examples=40)
def test_a_source_goes_through_its_own_prompts_one_by_one(ratios: list[float], seed: int) -> None:
    mixing = Mixing(ratios, seed=seed)
    seen = [0] * len(ratios)
    for group_id in range(350):
        source, place = mixing.place(group_id)
        assert place == seen[source]
        seen[source] += 1


@given(RATIOS, SEEDS, st.lists(st.integers(0, 3000), min_size=1, max_size=20))
@settings(max_examples=30)
def test_whoever_asks_in_whatever_order_hears_the_same(ratios: list[float], seed: int, ids: list[int]) -> None:
    in_order, any_order = Mixing(ratios, seed=seed), Mixing(ratios, seed=seed)
    expected = {group_id: in_order.place(group_id) for group_id in sorted(ids)}

    assert {group_id: any_order.place(group_id) for group_id in ids} == expected


def test_the_seed_moves_where_the_sequence_begins() -> None:
    assert len({tuple(turns([3, 2, 1], seed, range(30))) for seed in range(20)}) > 5


# Recorded at 8a86d2f, the commit before runs had several sources.
PROMPTS = [3, 0, 1, 4, 2, 1, 2, 3, 0, 4, 1, 4, 3, 0, 2]
ROWS = ["5", "1", "3", "4", "2", "0", "1", "2", "4", "3", "5", "0", "5", "3", "0"]


def test_one_source_has_the_order_and_the_seeds_that_it_always_had(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(str(number), number) for number in range(6)])
    pq.write_table(table, tmp_path / "a.parquet")
    data = asyncio.run(open_data((str(tmp_path / "a.parquet"),), ReadOptions(seed=7), cache=tmp_path))
    places = [Mixing([0.3], seed=7).place(group_id)[1] for group_id in range(15)]

    assert [prompt_index(place, num_prompts=5, seed=7) for place in places] == PROMPTS
    assert [data.row(place).messages[0]["content"] for place in places] == ROWS
    assert [sampling_seed(group, i, seed=7) for group in (0, 9) for i in (0, 3)] == [
        2028854884, 2084594875, 1078901829, 1507919222,
    ]  # fmt: skip
    assert [scoring_seed(group, seed=7) for group in (0, 1, 9)] == [2083679832, 369571992, 621768553]
    assert evaluation_seed(7) == 478858154


def row(content: str, index: int, **more: Any) -> dict[str, Any]:
    truth = {"style": "rule", "ground_truth": "4"}
    prompt = [{"role": "user", "content": content}]
    return {
        "prompt": prompt,
        "data_source": "openai/gsm8k",
        "reward_model": truth,
        "extra_info": {"index": index},
    } | more


def mixed(model: Path, tasks: Sequence[str], **more: Any) -> Config:
    sources = [
        {"name": "much", "ratio": 3, "tasks": list(tasks)},
        {"name": "little", "tasks": [tasks[0]], "rollout": {"max_completion_tokens": 8}, "eval": {"temperature": 0.0}},
    ]
    return config_of(model, *sources, run={"seed": 7}, **more)


def config_of(model: Path, *sources: dict[str, Any], **sections: Any) -> Config:
    own = {"model": {"path": str(model)}, "rollout": {"max_prompt_tokens": 64, "max_completion_tokens": 32}}
    return Config.model_validate(own | sections | {"sources": sources})


@pytest.fixture
async def sources(tiny_model: Path, letter_tasks: list[str]) -> Sources:
    config = mixed(tiny_model, letter_tasks)
    async with open_pool(config.sandbox.model_copy(update={"min_ready": 0}), "sources") as (sandboxes, _):
        return await open_sources(config, sandboxes)


def request(group_id: int, **more: Any) -> GroupRequest:
    return GroupRequest(group_id=group_id, policy_version=ANY_VERSION, **more)


async def test_a_group_says_which_source_it_is_of_and_has_its_settings(sources: Sources) -> None:
    prompts = [await prompt_of(sources, request(group_id)) for group_id in range(100)]
    limits = [sources.of(request(group_id))[0].config.rollout.max_completion_tokens for group_id in range(100)]

    assert [prompt.source for prompt in prompts].count("much") == 75
    assert {(prompt.source, limit) for prompt, limit in zip(prompts, limits, strict=True)} == {
        ("much", 32),
        ("little", 8),
    }
    much = [prompt.task for prompt in prompts if prompt.source == "much"]
    tasks = ("first", "second")
    assert much == [tasks[prompt_index(place, num_prompts=2, seed=7)] for place in range(75)]


async def test_an_evaluation_takes_all_prompts_of_one_source_and_then_those_of_the_next(sources: Sources) -> None:
    assert sources.num_eval_prompts == (2, 1)
    asked = [request(number, purpose="eval") for number in range(3)]
    prompts = [await prompt_of(sources, each) for each in asked]

    assert [(prompt.source, prompt.task) for prompt in prompts] == [
        ("much", "first"), ("much", "second"), ("little", "first"),
    ]  # fmt: skip
    assert [sources.of(each)[0].config.eval.temperature for each in asked] == [1.0, 1.0, 0.0]


async def test_an_evaluation_takes_no_more_problems_of_a_source_than_it_may(
    tiny_model: Path, letter_tasks: list[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist([row(str(number), number) for number in range(6)]), file)
    own = {"chat_template": "chatml_hermes"}
    config = config_of(
        tiny_model,
        {"name": "some", "tasks": letter_tasks, "eval": {"max_problems": 1}},
        {"name": "all", "tasks": letter_tasks, "eval": {"max_problems": 0}},
        {"name": "rows", "tasks": [file], "eval": {"tasks": [file]}, "agent": own},
        eval={"max_problems": 4},
    )
    async with open_pool(config.sandbox.model_copy(update={"min_ready": 0}), "sources") as (sandboxes, _):
        sources = await open_sources(config, sandboxes)
        asked = [request(number, purpose="eval") for number in (0, 1, 6)]
        prompts = [await prompt_of(sources, each) for each in asked]
        await sources.close()

    assert sources.num_eval_prompts == (1, 2, 4)
    assert [(prompt.source, prompt.task) for prompt in prompts] == [
        ("some", "first"), ("all", "first"), ("rows", "openai/gsm8k"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "training", "said"),
    [
        ({"tasks": ["gone.parquet"]}, True, r"^source rows: .*gone\.parquet"),
        ({"eval": {"tasks": ["a.parquet"]}}, True, r"^source rows: tasks is empty"),
        ({"tasks": ["a.parquet"]}, False, r"eval\.tasks is empty, but this is an evaluation"),
    ],
)
def test_a_mistake_in_a_source_is_told_with_its_name(
    tiny_model: Path, source: dict[str, Any], training: bool, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        check_inputs(config_of(tiny_model, {"name": "rows", **source}), training=training)


async def test_a_source_has_its_own_judges_which_are_asked_before_anything_is_sampled(
    tiny_model: Path, letter_tasks: list[str], tmp_path: Path
) -> None:
    stub = JudgeStub(lambda text: min(10, len(text)))
    async with stub.running() as url:
        judge = {"name": "q", "base_url": f"{url}/v1", "model": "m", "rubric": {"long": "It is long."}}
        config = config_of(
            tiny_model,
            {"name": "judged", "tasks": letter_tasks, "reward": {"judges": {"q": 2.0}, "verdict_weight": 0.5}},
            {"name": "plain", "tasks": letter_tasks},
            judges=[judge],
            run={"output_dir": str(tmp_path)},
        )
        async with open_pool(config.sandbox.model_copy(update={"min_ready": 0}), "sources") as (sandboxes, _):
            sources = await open_sources(config, sandboxes)
            assert len(stub.bodies) == 1
            found = {}
            for group_id in range(2):
                source, placed = sources.of(request(group_id))
                problem = await source.problem(placed, seed=7)
                reward = await reward_of(problem, said("aaaa"), sandboxes, seed=0, judging=source.judging)
                found[problem.prompt.source] = reward
            await sources.close()
            stub.said = "prose"
            with pytest.raises(ConfigError, match="judge q answered with text that is not JSON: 'prose'"):
                await open_sources(config, sandboxes)

    plain, judged = found["plain"], found["judged"]
    assert judged.value == pytest.approx(0.5 * plain.value + 2.0 * 0.4)
    assert not any(name.startswith("judge") for name in plain.terms)
    assert "write" in stub.bodies[1]["messages"][1]["content"]


async def prompt_of(sources: Sources, asked: GroupRequest) -> Prompt:
    source, placed = sources.of(asked)
    return (await source.problem(placed, seed=7)).prompt


def said(text: str) -> Trajectory:
    return replace(Recorder([0]).trajectory(), completion_text=text)
