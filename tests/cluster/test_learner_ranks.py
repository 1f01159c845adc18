"""Two learner ranks over gloo: the same step as one rank, and checkpoints that fit either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

RANKS = '''
"""Imports once and forks the ranks of each world. Each goes through the modes of its world: two steps on the same
groups, and rank 0's weights to a file."""
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import time

from actors.learner import Learner
from rayapp.config.algorithm import KlInRewardSection
from rayapp.config.config import Config
from rayapp.core.types import Reward, RolloutStatus
from rayapp.core.trajectories import summarize_group
from rayapp.learner.shares import Share, deal
from rayapp.runs.trajectories import read_groups
from rayapp.engine.weights.buckets import unpack
from support.learners import fork_ranks, import_learner
import torch

import_learner()
model, trajectories, checkpoint, out = sys.argv[1:]
all_groups = read_groups(Path(trajectories))
MODES = {2: ("save", "failed", "nf4"), 1: ("plain", "resume", "failed", "nf4")}


def run(world, rank, next_port):
    for mode in MODES[world]:
        run_mode(world, rank, mode, next_port())


def run_mode(world, rank, mode, port):
    packed = {"quantization": "nf4"} if mode == "nf4" else {}
    lora = {"lora": {"rank": 4, "send": "merged"}} if mode == "nf4" else {}
    config = Config.model_validate({
        "model": {"path": model, **packed}, "cluster": {"device": "cpu"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 16},
        "learner": {"num_learners": world, "compute_dtype": "float32", "max_tokens_per_microbatch": 40,
                    "optimizer": {"lr": 1e-3}, **lora},
    })
    groups = all_groups
    if mode == "failed":
        lost = {"reward": Reward.invalid("sandbox", "gone"), "status": RolloutStatus.ERROR_SANDBOX}
        groups = [groups[0], replace(groups[1], trajectories=tuple(replace(t, **lost) for t in groups[1].trajectories))]
        config = config.model_copy(update={
            "algorithm": config.algorithm.model_copy(update={
                "adv_estimator": "optimal_token_baseline",
                "kl_in_reward": KlInRewardSection(coef=0.5, type="k3"),
            }),
            "train": config.train.model_copy(update={"num_minibatches": 2}),
        })
    summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
    learner = Learner(config, rank, world, "127.0.0.1", port)
    first = learner.load_checkpoint(checkpoint) + 1 if mode == "resume" else 1
    for step in range(first, 3):
        shares = deal(summaries, config, world)
        if mode == "failed" and world == 2:
            shares = ((Share(0),), (Share(1),))
        metrics = learner.train_step(step, summaries, shares, *(groups[share.position] for share in shares[rank]))
        if step == 1 and mode == "save":
            learner.begin_checkpoint(checkpoint, 1)  # written while the second step is trained
    if mode == "save":
        while not learner.checkpoint_done():
            time.sleep(0.01)
    buckets = list(learner.export_weights(0, 1 << 20))
    if rank == 0:
        tensors = {name: t.float().numpy() for b in buckets for name, t in unpack(b.entries, torch.from_numpy(b.data))}
        np.savez(f"{out}/{mode}-{world}.npz", loss=metrics["learner/loss"], grad_norm=metrics["learner/grad_norm"],
                 **tensors)
    else:
        assert not buckets
    learner.close()


for world in (2, 1):
    fork_ranks(world, run)
'''


WriteGroups = Callable[..., Path]


@pytest.fixture(scope="module")
def found(
    tiny_model: Path,
    write_groups: WriteGroups,
    run_ranks: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What two ranks came to, and one that goes on from their checkpoint: `MODE-WORLD`."""
    folder = tmp_path_factory.mktemp("ranks")
    # Three groups: with two ranks one of them gets more.
    run_ranks(RANKS, tiny_model, write_groups(seed=5), folder / "checkpoint", folder)
    return {file.stem: dict(np.load(file)) for file in folder.glob("*.npz")}


def assert_same_model(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        # Two Adam steps at 1e-3: a gradient that differs in its last bits moves a weight by far less than one of bf16.
        np.testing.assert_allclose(found[name], array, rtol=1e-2, atol=1e-4, err_msg=name)


def test_two_ranks_take_the_step_of_one(found: dict[str, Any]) -> None:
    one, two = found["plain-1"], found["save-2"]
    np.testing.assert_allclose(two["loss"], one["loss"], atol=1e-5)
    np.testing.assert_allclose(two["grad_norm"], one["grad_norm"], rtol=1e-4)
    assert_same_model(two, one)


def test_two_ranks_that_share_packed_weights_take_the_step_of_one(found: dict[str, Any]) -> None:
    one, two = found["nf4-1"], found["nf4-2"]
    np.testing.assert_allclose(two["grad_norm"], one["grad_norm"], rtol=1e-4)
    assert_same_model(two, one)


def test_one_rank_goes_on_with_what_two_saved(found: dict[str, Any]) -> None:
    assert_same_model(found["resume-1"], found["plain-1"])


def test_a_rank_with_failed_groups_only_keeps_step_with_the_others(found: dict[str, Any]) -> None:
    # An estimator and a KL in the reward that score everything first: what each rank then holds must not decide what it
    # does next.
    assert_same_model(found["failed-2"], found["failed-1"])
