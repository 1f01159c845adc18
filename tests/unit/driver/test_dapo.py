"""DAPO's three: dynamic sampling with a cap, overlong filtering, and the soft overlong punishment. Off by default."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.config.algorithm import AlgorithmSection, DynamicSamplingSection, OverlongSection
from rayapp.config.config import Config
from rayapp.core.errors import TrainingAbortedError
from rayapp.core.timing import Phases
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Fork, GroupSummary, Reward, RolloutStatus, Trajectory
from rayapp.driver.group_rules import DynamicSampling, FailureBudget, has_signal
from rayapp.driver.loop import train_step
from rayapp.driver.store import StoredGroup, TrajectoryStore
from rayapp.driver.watchdog import Watchdog
from rayapp.learner.step_plan import loss_scale, make_table
from rayapp.rollout.overlong import overlong_penalty, shape_group
from rayapp.runs.tracking.metrics import summarize_step
from support import make


def trajectory(num_tokens: int, reward: Reward, *, truncated: bool = False) -> Trajectory:
    """One prompt token and `num_tokens` sampled ones."""
    status = RolloutStatus.TRUNCATED if truncated else RolloutStatus.COMPLETED
    return make.trajectory([0] * (1 + num_tokens), reward=reward, status=status)


def summary_of(group_id: int, rewards: list[float], valid: list[bool] | None = None) -> GroupSummary:
    group = make.group(*(trajectory(2, Reward(value=r)) for r in rewards), group_id=group_id)
    summary = summarize_group(group, time_total_s=0.0)
    return summary if valid is None else replace(summary, valid=np.array(valid))


@pytest.mark.parametrize(
    ("rewards", "valid", "expected"),
    [
        ([0.0, 1.0], None, True),
        ([1.0, 1.0], None, False),
        ([0.0, 0.0], None, False),
        ([0.5, 0.5, 0.0], [True, True, False], False),  # the third's 0 is not a verdict
        ([0.5, 0.0], [True, False], True),  # one valid: a failure, which has its own budget
        ([0.0, 0.0], [False, False], True),
    ],
)
def test_a_group_has_a_signal_unless_its_valid_rewards_are_equal(
    rewards: list[float], valid: list[bool] | None, *, expected: bool
) -> None:
    assert has_signal(summary_of(0, rewards, valid)) is expected


def summary_with_terms(*terms: dict[str, float], reward: float = 1.0, status: str = "scored") -> GroupSummary:
    each = (trajectory(2, Reward(value=reward, terms=part, status=status)) for part in terms)
    return summarize_group(make.group(*each), time_total_s=0.0)


def test_groups_are_compared_by_the_term_that_is_named() -> None:
    differs = summary_with_terms({"score": 1.0, "acc": 1.0}, {"score": 1.0, "acc": 0.0})
    assert has_signal(differs, "acc")
    assert not has_signal(differs, "score")
    assert not has_signal(differs)
    assert has_signal(summary_with_terms({"score": 1.0}, {"score": 0.0}), "acc"), "a number alone is its acc"
    assert not has_signal(summary_with_terms({}, {}, status="no_code"), "acc"), "no answer could be scored"


def test_a_term_that_rewards_do_not_have_ends_the_run_with_those_that_they_have() -> None:
    with pytest.raises(
        TrainingAbortedError, match=r"metric is 'accuracy', but no reward of task t has this term .*score"
    ):
        has_signal(summary_with_terms({"score": 1.0}, {"score": 0.0}), "accuracy")


@settings(max_examples=60, deadline=None)
@given(
    groups_per_step=st.integers(1, 4),
    cap=st.integers(1, 6),
    teaches=st.lists(st.booleans(), min_size=60, max_size=60),
    seed=st.integers(0, 2**16),
)
def test_every_step_is_full_and_the_same_whatever_order_groups_finish_in(
    groups_per_step: int, cap: int, teaches: list[bool], seed: int
) -> None:
    async def steps(shuffle: random.Random) -> list[tuple[list[int], float]]:
        sampling = DynamicSampling(DynamicSamplingSection(enabled=True, max_dropped_per_step=cap))
        store: TrajectoryStore[int] = TrajectoryStore(
            groups_per_step=groups_per_step, max_staleness=0, version=0, num_groups=100, refuses=sampling.refuses
        )
        done: list[tuple[list[int], float]] = []
        for step in range(1, 4):
            while store._next_in_order(groups_per_step) is None:
                ids, version = await store.reserve()
                shuffle.shuffle(ids)
                for i in ids:
                    summary = summary_of(i, [0.0, 1.0] if teaches[i % 60] else [1.0, 1.0])
                    await store.finish(replace(summary, min_policy_version=version), i)
            groups = await store.take(groups_per_step)
            await store.release(step)
            metrics = sampling.step_metrics()
            assert metrics["dynamic_sampling/dropped"] <= cap
            without = [g.ref for g in groups if not teaches[g.ref % 60]]
            assert len(without) == metrics["dynamic_sampling/kept_past_cap"]
            assert store.ledger().balances()
            done.append(([g.ref for g in groups], metrics["dynamic_sampling/dropped"]))
        return done

    one, other = asyncio.run(steps(random.Random(seed))), asyncio.run(steps(random.Random(seed + 1)))
    assert one == other
    assert all(len(ids) == groups_per_step for ids, _ in one)


async def test_failures_in_groups_that_are_dropped_count_and_stop_the_run() -> None:
    sampling = DynamicSampling(DynamicSamplingSection(enabled=True, max_dropped_per_step=8))
    failing = replace(
        summary_of(1, [1.0, 1.0, 0.0, 0.0], [True, True, False, False]), failure_kinds=("", "", "engine", "engine")
    )
    # Two: a single group never ends a run.
    assert sampling.refuses(failing, 0)
    assert sampling.refuses(replace(failing, group_id=3), 0)
    trained = replace(summary_of(2, [0.0, 1.0]), failure_kinds=("", ""))
    nothing: Any = SimpleNamespace(phase=print)

    async def no_stacks() -> str:
        return ""

    watchdog = Watchdog(report_after_s=60, stop_after_s=60, report=print, dump_stacks=no_stacks)
    run: Any = SimpleNamespace(failures=FailureBudget(0.3), sampling=sampling, watchdog=watchdog, tracker=nothing)
    with pytest.raises(TrainingAbortedError, match=r"40% of the trajectories .*engine: 4"):
        await train_step(run, 1, [StoredGroup(summary=trained, ref=object())], Phases())
    assert sampling.take_dropped() == []  # counted once


def test_dynamic_sampling_is_refused_where_equal_rewards_teach_something() -> None:
    for estimator in ("gdpo", "remax", "reinforce_plus_plus"):
        with pytest.raises(ValueError, match="learns from these too"):
            Config.model_validate({"algorithm": {"adv_estimator": estimator, "dynamic_sampling": {"enabled": True}}})


@given(num_tokens=st.integers(0, 300), buffer_tokens=st.integers(1, 199), penalty=st.floats(0.01, 10.0))
def test_the_penalty_is_that_of_the_paper(num_tokens: int, buffer_tokens: int, penalty: float) -> None:
    max_tokens = 200
    found = overlong_penalty(num_tokens, max_tokens=max_tokens, buffer_tokens=buffer_tokens, penalty=penalty)
    # DAPO (13): 0 up to L_max - L_cache, ((L_max - L_cache) - |y|) / L_cache up to L_max, -1 above.
    if num_tokens <= max_tokens - buffer_tokens:
        expected = 0.0
    elif num_tokens <= max_tokens:
        expected = penalty * ((max_tokens - buffer_tokens) - num_tokens) / buffer_tokens
    else:
        expected = -penalty
    assert found == pytest.approx(expected, abs=1e-12)


def overlong_of(config: Config) -> tuple[OverlongSection, int]:
    return config.algorithm.overlong, config.rollout.max_completion_tokens


def test_the_penalty_is_in_the_reward_and_recorded_beside_it_and_failures_have_none() -> None:
    config = Config.model_validate(
        {"rollout": {"max_completion_tokens": 120}, "algorithm": {"overlong": {"buffer_tokens": 20}}}
    )
    group = make.group(
        trajectory(90, Reward(value=1.0, terms={"solved": 1.0})),
        trajectory(110, Reward(value=1.0, terms={"solved": 1.0})),
        trajectory(120, Reward.invalid("sandbox_gone", "")),
    )
    shaped, summary = shape_group(group, summarize_group(group, time_total_s=3.0), *overlong_of(config))
    assert summary.rewards.tolist() == [1.0, 0.5, 0.0]  # 110 tokens are half way from 100 to 120
    assert [t.reward.terms.get("overlong_penalty") for t in shaped.trajectories] == [0.0, -0.5, None]
    assert shaped.trajectories[1].reward.terms["solved"] == 1.0
    assert summary.time_total_s == 3.0


def test_tool_results_count_for_the_penalty_as_they_do_for_the_limit() -> None:
    config = Config.model_validate(
        {"rollout": {"max_completion_tokens": 120}, "algorithm": {"overlong": {"buffer_tokens": 20}}}
    )
    played = trajectory(110, Reward(value=1.0))
    mostly_read = replace(played, response_mask=np.isin(np.arange(111), [1, *range(100, 111)]))
    group = make.group(played, mostly_read)

    shaped, _ = shape_group(group, summarize_group(group, time_total_s=0.0), *overlong_of(config))

    assert [t.reward.value for t in shaped.trajectories] == [0.5, 0.5]


def test_prompts_that_agents_write_are_no_part_of_the_length_and_each_branch_is_a_conversation() -> None:
    config = Config.model_validate(
        {"rollout": {"max_completion_tokens": 120}, "algorithm": {"overlong": {"buffer_tokens": 20}}}
    )
    played = replace(trajectory(1000, Reward(value=1.0)), response_mask=np.arange(1001) >= 900)
    # Two conversations, each with 900 prompt tokens and 50 sampled ones: the second begins after -1.
    forked = replace(
        trajectory(1899, Reward(value=1.0)),
        response_mask=np.arange(1900) % 950 >= 900,
        forks=(Fork(start=950, after=-1),),
    )
    group = replace(make.group(played, forked), prompt=make.prompt())

    shaped, summary = shape_group(group, summarize_group(group, time_total_s=0.0), *overlong_of(config))

    assert [t.reward.terms["overlong_penalty"] for t in shaped.trajectories] == [pytest.approx(-0.05), 0.0]
    assert summarize_step([summary], version=0)["length/prompt/mean"] == 900.0


def test_a_trajectory_that_ran_out_of_turns_is_not_filtered_as_too_long() -> None:
    config = Config.model_validate({"algorithm": {"overlong": {"filter": True}}})
    looped = replace(trajectory(3, Reward(value=0.0)), status=RolloutStatus.MAX_TURNS)
    group = make.group(looped, trajectory(3, Reward(value=1.0)), trajectory(3, Reward(value=1.0), truncated=True))

    table = make_table([summarize_group(group, time_total_s=0.0)], config.algorithm, compares_groups=True)

    assert table.loss_rows.tolist() == [0, 1]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=8),
    truncated=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_truncated_trajectories_are_in_the_baseline_and_not_in_the_loss(
    sizes: list[int], truncated: list[bool]
) -> None:
    config = Config.model_validate({"algorithm": {"overlong": {"filter": True}}})
    members = [trajectory(n, Reward(value=float(i)), truncated=truncated[i]) for i, n in enumerate(sizes)]
    summaries = [summarize_group(make.group(*members), time_total_s=0.0)]
    table = make_table(summaries, config.algorithm, compares_groups=True)
    assert table.trained.all()
    kept = [i for i in range(len(sizes)) if not truncated[i]]
    assert table.loss_rows.tolist() == kept
    scale = loss_scale(table, np.ones(len(sizes), np.bool_), config.rollout.max_completion_tokens, 1)
    assert scale.num_tokens == sum(sizes[i] for i in kept)
    assert scale.num_trajectories == len(kept)
    whole = make_table(summaries, AlgorithmSection(), compares_groups=True)
    assert whole.loss_rows.size == len(sizes)
