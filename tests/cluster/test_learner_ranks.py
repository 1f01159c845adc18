"""Two learner ranks over gloo: the same step as one rank, and checkpoints that fit either."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

RANK = '''
"""One rank: two steps on the same groups, a checkpoint, and rank 0's weights to a file."""
import sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import time

from actors.learner import Learner
from rayapp.config.config import Config
from rayapp.core.types import Reward, RolloutStatus
from rayapp.core.summaries import summarize_group
from rayapp.learner.shares import Share, deal
from rayapp.runs.trajectories import read_groups
from rayapp.engine.weights.buckets import unpack
import torch

rank, world, port = (int(word) for word in sys.argv[1:4])
model, trajectories, checkpoint, out = sys.argv[4:8]
config = Config.model_validate({
    "model": {"path": model}, "cluster": {"device": "cpu"},
    "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 16},
    "learner": {"num_learners": world, "compute_dtype": "float32", "max_tokens_per_microbatch": 40,
                "optimizer": {"lr": 1e-3}},
})
groups = read_groups(Path(trajectories))
if sys.argv[8] == "failed":
    lost = {"reward": Reward.invalid("sandbox", "gone"), "status": RolloutStatus.ERROR_SANDBOX}
    groups = [groups[0], replace(groups[1], trajectories=tuple(replace(t, **lost) for t in groups[1].trajectories))]
    config = config.model_copy(update={
        "algorithm": config.algorithm.model_copy(update={"adv_estimator": "optimal_token_baseline"}),
        "train": config.train.model_copy(update={"num_minibatches": 2}),
    })
summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
learner = Learner(config, rank, world, "127.0.0.1", port)
first = 1
if Path(checkpoint).exists() and sys.argv[8] == "resume":
    first = learner.load_checkpoint(checkpoint) + 1
for step in range(first, 3):
    shares = deal(summaries, config, world)
    if sys.argv[8] == "failed" and world == 2:
        shares = ((Share(0),), (Share(1),))
    metrics = learner.train_step(step, summaries, shares, *(groups[share.position] for share in shares[rank]))
    if step == 1 and sys.argv[8] == "save":
        learner.begin_checkpoint(checkpoint, 1)  # written while the second step is trained
if sys.argv[8] == "save":
    while not learner.checkpoint_done():
        time.sleep(0.01)
buckets = list(learner.export_weights(1 << 20))
if rank == 0:
    tensors = {name: t.float().numpy() for b in buckets for name, t in unpack(b.entries, torch.from_numpy(b.data))}
    np.savez(out, loss=metrics["learner/loss"], grad_norm=metrics["learner/grad_norm"], **tensors)
else:
    assert not buckets
learner.close()
'''


WriteGroups = Callable[..., Path]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(world: int, folder: Path, model: Path, trajectories: Path, mode: str) -> dict[str, np.ndarray]:
    """Run all ranks to their end. Returns what rank 0 wrote."""
    out, port = folder / f"{mode}-{world}.npz", free_port()
    arguments = [str(path) for path in (model, trajectories, folder / "checkpoint", out)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(port), *arguments, mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(world)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    return dict(np.load(out))


@pytest.fixture(scope="module")
def trajectories(write_groups: WriteGroups) -> Path:
    """Three groups: with two ranks one of them gets more."""
    return write_groups(seed=5)


@pytest.fixture(scope="module")
def one_rank(tiny_model: Path, trajectories: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return run_ranks(1, tmp_path_factory.mktemp("one"), tiny_model, trajectories, "plain")


def assert_same_model(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        # Two Adam steps at 1e-3: a gradient that differs in its last bits moves a weight by far less than one of bf16.
        np.testing.assert_allclose(found[name], array, rtol=1e-2, atol=1e-4, err_msg=name)


def test_two_ranks_take_the_step_of_one(
    one_rank: dict[str, np.ndarray], tiny_model: Path, trajectories: Path, tmp_path: Path
) -> None:
    two = run_ranks(2, tmp_path, tiny_model, trajectories, "save")
    np.testing.assert_allclose(two["loss"], one_rank["loss"], atol=1e-5)
    np.testing.assert_allclose(two["grad_norm"], one_rank["grad_norm"], rtol=1e-4)
    assert_same_model(two, one_rank)
    # ... and what two ranks saved after the first step, one rank goes on with
    resumed = run_ranks(1, tmp_path, tiny_model, trajectories, "resume")
    assert_same_model(resumed, one_rank)


def test_a_rank_with_failed_groups_only_keeps_step_with_the_others(
    tiny_model: Path, trajectories: Path, tmp_path: Path
) -> None:
    # An estimator that scores everything first: what each rank then holds must not decide what it does next.
    one, two = (run_ranks(world, tmp_path, tiny_model, trajectories, "failed") for world in (1, 2))
    assert_same_model(two, one)
