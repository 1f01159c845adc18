"""`rayapp plan --simulate`: the real driver, store and groups with stand-ins that take given seconds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayapp.config.config import Config
from rayapp.core.errors import InputError
from rayapp.core.types import Group, Prompt, Reward, RolloutStatus, Trajectory, TurnRecord
from rayapp.driver.forecast import LogNormal, Play, Seconds, Trace, Turn, VirtualTimeLoop, forecast, plays_of
from rayapp.runs.trajectories import write_trajectories


def config(**train: Any) -> Config:
    rollout = {"group_size": 16, "max_prompt_tokens": 32, "max_completion_tokens": 64, "num_workers": 2}
    return Config.model_validate({"rollout": rollout, "train": {"groups_per_step": 2} | train})


def seconds(**own: Any) -> Seconds:
    given: dict[str, Any] = {
        "decode": lambda num, tokens: 2 / 64, "prefill": lambda tokens: 0.0, "train": lambda load: 10.0, "sync": 0.0,
        "turn": 0.0, "max_num_seqs": 1000, "kv_tokens": 10**9,
    }  # fmt: skip
    return Seconds(**given | own)


class RecordedTools:
    """Tools of `benchmarks.async_vs_sync`: log-normal with a mean of 5 s, five draws a group, as the stand-in engine
    writes five different texts."""

    def group(self, group_id: int, size: int) -> Sequence[Play]:
        draws = [5.0 * exp(random.Random(f"{group_id} {text}").gauss(-0.18, 0.6)) for text in range(5)]
        return [Play(32, (Turn(64, draws[index % 5]),)) for index in range(size)]


def constant(num_tokens: int = 64) -> LogNormal:
    return LogNormal(num_prompt=32, median=num_tokens, sigma=0.0, longest=64)


@pytest.mark.parametrize(("max_staleness", "recorded_s"), [(0, 23.0), (1, 12.5)])
def test_the_seconds_of_a_recorded_run_are_met_within_15_percent(max_staleness: int, recorded_s: float) -> None:
    found = forecast(config(max_staleness=max_staleness), seconds(), RecordedTools(), num_steps=10)
    assert found.step_s == pytest.approx(recorded_s, rel=0.15)


def test_a_synchronous_step_by_hand() -> None:
    found = forecast(config(), seconds(sync=1.0), constant(), num_steps=4)
    # 64 decoding steps of 2 / 64 s, 10 s of training, 1 s of sync.
    assert found.step_s == pytest.approx(13.0)
    assert found.tokens_per_s == pytest.approx(2 * 16 * 64 / 13.0)
    assert (found.servers_idle, found.learners_idle) == (pytest.approx(11 / 13), pytest.approx(3 / 13))
    assert found.staleness == {0: 1.0}


def test_asynchronous_servers_sample_while_the_learners_train() -> None:
    found = forecast(config(max_staleness=1), seconds(), constant(), num_steps=4)
    assert found.step_s == pytest.approx(10.0)
    assert found.learners_idle == pytest.approx(0.0, abs=1e-6)
    assert max(found.staleness) == 1


def test_a_small_cache_makes_sequences_wait() -> None:
    # Room for 16 of 32 sequences of 96 tokens: two waves of 2 s.
    found = forecast(config(), seconds(kv_tokens=16 * 96), constant(), num_steps=4)
    assert found.step_s == pytest.approx(14.0)


def test_each_prompt_is_computed_once_a_group() -> None:
    found = forecast(
        config(), seconds(prefill=lambda tokens: tokens / 32 if tokens > 1 else 0.0), constant(), num_steps=4
    )
    assert found.step_s == pytest.approx(2 * 1.0 + 2.0 + 10.0)


def test_partial_rollouts_do_not_wait_for_the_longest() -> None:
    lengths = LogNormal(num_prompt=32, median=12, sigma=1.2, longest=64)
    slow = seconds(train=lambda load: 0.1)
    whole, partial = (
        forecast(config(**keys), slow, lengths, num_steps=12)
        for keys in ({}, {"max_staleness": 2, "partial_rollouts": True})
    )
    assert partial.step_s < whole.step_s
    assert max(partial.staleness) <= 2


def test_trajectories_that_miss_the_deadline_are_counted() -> None:
    limited = config().model_copy(update={"rollout": config().rollout.model_copy(update={"group_deadline_s": 20.0})})

    class OneSlow:
        def group(self, group_id: int, size: int) -> Sequence[Play]:
            return [Play(32, (Turn(64, 30.0 if index == 0 else 0.0),)) for index in range(size)]

    assert forecast(limited, seconds(), OneSlow(), num_steps=3).num_late == 2 * 3


def test_lengths_come_from_a_recorded_run(tmp_path: Path) -> None:
    mask = np.array([False] * 3 + [True] * 5 + [False] * 2 + [True] * 4)
    turns = [
        TurnRecord(start=start, end=end, text="", finish_reason="stop", policy_version=0, started_at_s=0.0,
                   queued_s=0.0, generate_s=0.0)
        for start, end in ((3, 8), (10, 14))
    ]  # fmt: skip
    trajectory = Trajectory(
        token_ids=np.arange(14, dtype=np.int32), response_mask=mask, rollout_log_probs=np.zeros(14, np.float32),
        completion_text="", status=RolloutStatus.COMPLETED, turns=tuple(turns), min_policy_version=0,
        max_policy_version=0, reward=Reward(value=1.0, time_score_s=0.25),
    )  # fmt: skip
    prompt = Prompt(task="t", text="", token_ids=np.arange(3, dtype=np.int32))
    (tmp_path / "trajectories").mkdir()
    write_trajectories(
        tmp_path / "trajectories" / "step=000001.parquet", 1,
        [Group(group_id=0, prompt=prompt, trajectories=(trajectory, trajectory))],
    )  # fmt: skip
    trace = Trace(tmp_path)
    assert trace.group(7, 2)[0] == Play(3, (Turn(5, 0.0, 2), Turn(4, 0.25, 0)))
    assert len(trace.group(7, 5)) == 5
    assert forecast(config(), seconds(), trace, num_steps=2).step_s == pytest.approx(10.25 + 9 * 2 / 64)


@pytest.mark.parametrize("wrong", ["nowhere", "0", "5,x", "5,-1", "nan"])
def test_lengths_that_are_no_lengths_are_refused(wrong: str) -> None:
    with pytest.raises(InputError, match="neither a run folder nor a median"):
        plays_of(config(), wrong, 0.0)


def test_a_folder_without_trajectories_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no trajectories"):
        plays_of(config(), str(tmp_path), 0.0)


def test_the_clock_jumps_but_waits_for_threads() -> None:
    async def hours() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.gather(asyncio.sleep(3600), asyncio.to_thread(time.sleep, 0.2))
        return loop.time()

    started = time.monotonic()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(hours()) == pytest.approx(3600, abs=1)
    assert time.monotonic() - started < 60
