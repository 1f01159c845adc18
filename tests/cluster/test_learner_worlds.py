"""One, two and four ranks over gloo: each has the gradient of a plain computation, and reads any checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

MAX_GRADIENT_ERROR = 2e-6
"""Of the gradient's largest entry; as in tests/unit/learner/test_exactness.py."""

RANKS = '''
"""Imports once and forks the ranks of each case."""
import sys, time
from functools import partial
from pathlib import Path

import numpy as np

from actors.learner import Learner
from rayapp.config.config import Config
from rayapp.core.trajectories import summarize_group
from rayapp.learner.shares import deal
from rayapp.runs.trajectories import read_groups
from support.learners import fork_ranks, import_learner, take_sgd, whole_weights

import_learner()
model, trajectories, checkpoint, out = sys.argv[1:]
groups = read_groups(Path(trajectories))
summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
CASES = [(world, "gradient", share) for world in (1, 2, 4) for share in ("shared", "packed")]
CASES += [(2, "save", "shared"), (1, "load", "shared"), (4, "load", "shared")]


def run(mode, share, world, rank, next_port):
    config = Config.model_validate({
        "model": {"path": model}, "cluster": {"device": "cpu"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 16},
        "learner": {"num_learners": world, "compute_dtype": "float32", "max_tokens_per_microbatch": 40,
                    "cpu_threads": 1, "share_prefixes": share == "shared",
                    "optimizer": {"lr": 1e-3, "max_grad_norm": 1e9}},
    })
    learner = Learner(config, rank, world, "127.0.0.1", next_port())
    policy = learner._learner

    def step():
        shares = deal(summaries, config, world)
        learner.train_step(1, summaries, shares, *(groups[share.position] for share in shares[rank]))

    if mode == "gradient":
        take_sgd(policy)
        before = whole_weights(policy)
        step()
        after = whole_weights(policy)
        tensors = {name: before[name] - after[name] for name in before}
    elif mode == "save":
        step()
        learner.begin_checkpoint(checkpoint, 1)
        while not learner.checkpoint_done():
            time.sleep(0.01)
        tensors = whole_weights(policy)
    else:
        assert learner.load_checkpoint(checkpoint) == 1
        tensors = whole_weights(policy)
        tensors |= {f"moment.{name}": policy.optimizer.state[p]["exp_avg"].full_tensor().numpy()
                    for name, p in policy.model.named_parameters()}
    if rank == 0:
        np.savez(f"{out}/{mode}-{world}-{share}.npz", **tensors)
    learner.close()


for world, mode, share in CASES:
    print(f"{mode} with {world}, {share}:", flush=True)
    fork_ranks(world, partial(run, mode, share))
'''


WriteGroups = Callable[..., Path]
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def trajectories(write_groups: WriteGroups) -> Path:
    """Three groups: with two ranks one of them gets more, with four one gets none."""
    return write_groups(seed=11)


@pytest.fixture(scope="module")
def found(
    tiny_model: Path, trajectories: Path, run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Arrays]:
    """What rank 0 of each case wrote: `MODE-WORLD-SHARE`."""
    folder = tmp_path_factory.mktemp("worlds")
    run_ranks(RANKS, tiny_model, trajectories, folder / "checkpoint", folder, timeout_s=1500)
    return {file.stem: dict(np.load(file)) for file in folder.glob("*.npz")}


@pytest.fixture(scope="module")
def plain_gradient(tiny_model: Path, trajectories: Path) -> Arrays:
    """GRPO sequence by sequence: -sum(advantage x log-prob) / number of response tokens, in float32."""
    from transformers import AutoModelForCausalLM

    from rayapp.runs.trajectories import read_groups

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    groups = read_groups(trajectories)
    total = sum(t.num_response_tokens for group in groups for t in group.trajectories)
    for group in groups:
        rewards = np.array([t.reward.value for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        for t, advantage in zip(group.trajectories, advantages, strict=True):
            tokens = torch.from_numpy(t.token_ids.astype(np.int64))
            log_probs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            mask = torch.from_numpy(t.response_mask[1:].astype(np.float32))
            (-(float(advantage) / total) * (log_probs * mask).sum()).backward()
    return {f"causal_lm.{name}": p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share", ["shared", "packed"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_ranks_gives_the_plain_gradient(
    world: int, share: str, plain_gradient: Arrays, found: dict[str, Arrays]
) -> None:
    gradients = found[f"gradient-{world}-{share}"]
    scale = max(float(np.abs(gradient).max()) for gradient in plain_gradient.values())
    assert plain_gradient.keys() <= gradients.keys()
    for name, gradient in plain_gradient.items():
        error = float(np.abs(gradients[name] - gradient).max())
        assert error < MAX_GRADIENT_ERROR * scale + 1e-7, f"{name}: {error} of {scale}"


def test_what_two_ranks_saved_is_restored_by_four_and_by_one_to_the_last_bit(found: dict[str, Arrays]) -> None:
    saved = found["save-2-shared"]
    restored = {world: found[f"load-{world}-shared"] for world in (1, 4)}
    for world, own in restored.items():
        for name, array in saved.items():
            assert np.array_equal(own[name], array), f"{name} on {world} ranks"
    moments = [name for name in restored[1] if name.startswith("moment.")]
    assert any(restored[1][name].any() for name in moments)
    assert all(np.array_equal(restored[1][name], restored[4][name]) for name in moments)
