"""`learner.max_tokens_per_microbatch: auto`: the result fits and fills the memory; an error explains if nothing
fits."""

from __future__ import annotations

import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayapp.config.config import Config, with_values
from rayapp.core.errors import LearnerError
from rayapp.core.machine import available_memory
from rayapp.core.types import Group
from rayapp.learner.memory.plan import (
    gathered_bytes,
    plan_learner,
)
from rayapp.learner.memory.shape import model_shape
from rayapp.learner.memory.token_budget import (
    LARGEST,
    MemoryNeed,
    find_token_budget,
    free_bytes,
    measure_need,
    memory_meter,
)
from support import make
from support.learners import learner_alone, save_llama, take_step, whole_weights
from support.timing import takes_at_most_s

MIB = 2**20
MAX_PLAN_ERROR = 0.10
"""The plan leaves out what a layer's backward needs for a moment beside what its forward kept."""


def config_of(model: Path, **learner: Any) -> Config:
    usual = {"log_prob_chunk_tokens": 16, "max_tokens_per_microbatch": "auto", "compile": False}  # as on a CPU
    return make.config(model, rollout={"max_prompt_tokens": 24, "max_completion_tokens": 40}, learner=usual | learner)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, and more vocabulary than width, as real models have."""
    folder = tmp_path_factory.mktemp("models") / "deep"
    return save_llama(folder, vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers of 256: activations are most of a step, as they are for real models."""
    folder = tmp_path_factory.mktemp("models") / "wide"
    return save_llama(folder, vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=6)


def groups_of(num_tokens: int, longest: int) -> list[Group]:
    """One group of trajectories of the longest kind, all different from the first token on, predicted but for it."""
    count = num_tokens // longest
    tokens = np.random.default_rng(0).integers(2, 90, (count, longest + 1)).astype(np.int32)
    tokens[:, 0] = np.arange(count) % 90
    rows = (make.trajectory(row, 1, reward=float(i % 2), log_prob=-4.0) for i, row in enumerate(tokens))
    return [make.group(*rows)]


def peak_of_step(config: Config, num_tokens: int) -> int:
    """Bytes that torch's profiler counts over a second step, of micro-batches of so many tokens each."""
    learner_section = config.learner.model_copy(update={"max_tokens_per_microbatch": num_tokens})
    config = config.model_copy(update={"learner": learner_section})
    with learner_alone(config) as (learner, _):
        longest = config.max_model_tokens
        take_step(learner, groups_of(2 * longest, longest))  # a short one: it makes the optimizer's moments
        with torch.autograd.profiler.profile(profile_memory=True) as profiled:
            take_step(learner, groups_of(2 * num_tokens, longest), 2)
    assert profiled.kineto_results is not None
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"activation_checkpointing": True}, {"lora": {"rank": 4}}, {"compute_dtype": "bfloat16"}],
    ids=["plain", "recomputed", "adapters", "bfloat16"],
)
@pytest.mark.parametrize("size", [pytest.param("tiny", marks=pytest.mark.long), "deep"])
def test_what_is_found_fits_and_twice_as_much_does_not(
    tiny_model: Path, deep_model: Path, size: str, changes: dict[str, Any]
) -> None:
    config, room = config_of(tiny_model if size == "tiny" else deep_model, **changes), 20 * MIB
    with learner_alone(with_values(config, learner={"max_tokens_per_microbatch": LARGEST})) as (learner, ranks):
        need = measure_need(config, ranks, learner.model)
        found = find_token_budget(config, ranks, learner.model, room_bytes=room)
    assert found & (found - 1) == 0
    assert found >= 2 * config.max_model_tokens
    assert need.of(found) <= room < need.of(2 * found)
    # Counted independently, over a whole step. The need adds the peaks of layers and head, which don't coincide.
    taken = peak_of_step(config, found)
    assert 0.75 * need.of(found) <= taken <= need.of(found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpointing": True},
        {"activation_checkpointing": 1},
        {"lora": {"rank": 16}},
        pytest.param({"compute_dtype": "bfloat16"}, marks=pytest.mark.long),  # slow where it is emulated
    ],
    ids=["plain", "recomputed", "first layer recomputed", "adapters", "bfloat16"],
)
def test_the_plan_is_what_torch_allocates_in_a_step(wide_model: Path, changes: dict[str, Any]) -> None:
    num_tokens, chunk_rows, softmax_rows = 2048, 256, 64
    config = config_of(wide_model, max_tokens_per_microbatch=num_tokens, log_prob_chunk_tokens=chunk_rows, **changes)
    shape = model_shape(config)
    plan = plan_learner(shape, config)
    # A step finds weights and moments there. On CPU every layer stays gathered, the float32 softmax takes
    # `CPU_SOFTMAX_ROWS` rows at a time, and one rank reduces nothing.
    head, backward, _ = plan.moments
    softmax = 8 * (chunk_rows - softmax_rows) * shape.vocabulary
    working = max(head.activations + head.head - softmax, backward.activations + backward.head)
    expected = plan.gradients + gathered_bytes(shape, config.learner, shape.num_layers) + working

    taken = peak_of_step(config, num_tokens)

    assert taken == pytest.approx(expected, rel=MAX_PLAN_ERROR)


def test_a_learner_trains_with_what_it_found_and_nothing_else_has_changed(tiny_model: Path) -> None:
    groups, found = groups_of(512, 64), []
    with learner_alone(config_of(tiny_model)) as (learner, ranks):
        # A tiny model on this machine: half of what is free is far more than 65536 of its tokens take.
        assert learner.config.learner.token_budget == LARGEST
        assert all(parameter.grad is None for parameter in learner.model.parameters())
        assert 0 < free_bytes(ranks, learner.model) < available_memory()
    for tokens in ("auto", LARGEST):
        with learner_alone(config_of(tiny_model, max_tokens_per_microbatch=tokens)) as (learner, _):
            begun = torch.get_rng_state(), whole_weights(learner)
            take_step(learner, groups)
            found.append((*begun, whole_weights(learner)))
    (auto_rng, auto, after_probe), (plain_rng, plain, without_probe) = found
    assert torch.equal(auto_rng, plain_rng)
    assert all((auto[name] == plain[name]).all() for name in plain)
    assert all((after_probe[name] == without_probe[name]).all() for name in plain)
    assert not all((after_probe[name] == plain[name]).all() for name in plain)


def test_probes_take_a_moment_and_leave_nothing_behind(deep_model: Path) -> None:
    config = config_of(deep_model, max_tokens_per_microbatch=4096)
    with learner_alone(config) as (learner, ranks):
        parameters = [p.to_local() for p in learner.model.parameters()]  # type: ignore[attr-defined]
        with memory_meter(ranks.device, parameters) as meter:
            first = measure_need(config, ranks, learner.model)
            meter.restart()
            assert meter.marks[0] < 64 * 1024
        # Equal in every call: nothing of an earlier probe is counted.
        assert measure_need(config, ranks, learner.model).of(10_000) == first.of(10_000)
        with takes_at_most_s(20, time.process_time):
            measure_need(config, ranks, learner.model)


def test_the_meter_counts_what_is_alive_at_once() -> None:
    kept = torch.ones(1000)
    with memory_meter(torch.device("cpu"), [kept]) as meter:
        first = kept + 1  # 4000 bytes
        second = first * 2
        del first
        kept.sum()  # 4 bytes more
        assert meter.marks == [4000, 8000, 4004]
        second.untyped_storage().resize_(0)
        meter.restart()
        assert meter.marks == [0]


def test_the_worst_moment_depends_on_the_number_of_tokens() -> None:
    need = MemoryNeed(fixed=np.array([100.0, 10.0]), per_token=np.array([1.0, 4.0]))
    # 100 + 20 against 10 + 80; 100 + 40 against 10 + 160.
    assert (need.of(20), need.of(40)) == (120, 170)
    # 100 + n <= 130 and 10 + 4 n <= 130: both at 30.
    assert need.fits(130) == 30
    assert need.fits(210) == 50
    assert need.fits(99) < 1


def test_too_little_room_for_the_longest_trajectory_says_what_to_lower(tiny_model: Path) -> None:
    config = config_of(tiny_model)
    told = r"longest trajectory, 64 tokens .* takes \d+ MiB .*, and 0 MiB are free, enough for 0 tokens"
    with learner_alone(config) as (learner, ranks), pytest.raises(LearnerError, match=told):
        find_token_budget(config, ranks, learner.model, room_bytes=MIB // 2)
