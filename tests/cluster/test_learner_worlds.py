"""One, two and four ranks over gloo: each has the gradient of a plain computation, and reads any checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rayapp.testing.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(1800)]

MAX_GRADIENT_ERROR = 2e-6
"""Of the gradient's largest entry; as in tests/unit/learner/test_exactness.py."""
OWNERS_LIMIT_S = 900.0

RANK = '''
"""One rank: with plain SGD at a rate of 1, a step moves the weights by their gradient."""
import sys, time
from pathlib import Path

import numpy as np
import torch

from actors.learner import Learner
from rayapp.config.config import Config
from rayapp.core.summaries import summarize_group
from rayapp.learner.shares import deal
from rayapp.runs.trajectories import read_groups

rank, world, port = (int(word) for word in sys.argv[1:4])
model, trajectories, checkpoint, out, mode, share = sys.argv[4:10]
config = Config.model_validate({
    "model": {"path": model}, "cluster": {"device": "cpu"},
    "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 16},
    "learner": {"num_learners": world, "compute_dtype": "float32", "max_tokens_per_microbatch": 40, "cpu_threads": 1,
                "share_prefixes": share == "shared", "optimizer": {"lr": 1e-3, "max_grad_norm": 1e9}},
})
groups = read_groups(Path(trajectories))
summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
learner = Learner(config, rank, world, "127.0.0.1", port)

def whole():
    named = learner._learner.model.named_parameters()
    return {name: p.full_tensor().detach().numpy().copy() for name, p in named}

def step(number):
    shares = deal(summaries, config, world)
    learner.train_step(number, summaries, shares, *(groups[share.position] for share in shares[rank]))

if mode == "gradient":
    learner._learner.optimizer = torch.optim.SGD(learner._learner.model.parameters(), lr=1.0)
    learner._learner.config = config.model_copy(update={"learner": config.learner.model_copy(
        update={"optimizer": config.learner.optimizer.model_copy(update={"lr": 1.0})})})
    before = whole()
    step(1)
    after = whole()
    tensors = {name: before[name] - after[name] for name in before}
elif mode == "save":
    step(1)
    learner.begin_checkpoint(checkpoint, 1)
    while not learner.checkpoint_done():
        time.sleep(0.01)
    tensors = whole()
else:
    assert learner.load_checkpoint(checkpoint) == 1
    tensors = whole()
    optimizer = learner._learner.optimizer
    tensors |= {f"moment.{name}": optimizer.state[p]["exp_avg"].full_tensor().numpy()
                for name, p in learner._learner.model.named_parameters()}
if rank == 0:
    np.savez(out, **tensors)
learner.close()
'''


WriteGroups = Callable[..., Path]


def run_ranks(
    world: int, folder: Path, model: Path, trajectories: Path, mode: str, share: str = "shared"
) -> dict[str, np.ndarray]:
    """Run all ranks to their end. Returns what rank 0 wrote."""
    out, port = folder / f"{mode}-{world}-{share}.npz", free_port()
    arguments = [str(path) for path in (model, trajectories, folder / "checkpoint", out)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(world), str(port), *arguments, mode, share],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=OWNERS_LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(outputs)
    return dict(np.load(out))


@pytest.fixture(scope="module")
def trajectories(write_groups: WriteGroups) -> Path:
    """Three groups: with two ranks one of them gets more, with four one gets none."""
    return write_groups(seed=11)


@pytest.fixture(scope="module")
def plain_gradient(tiny_model: Path, trajectories: Path) -> dict[str, np.ndarray]:
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
    world: int,
    share: str,
    plain_gradient: dict[str, np.ndarray],
    tiny_model: Path,
    trajectories: Path,
    tmp_path: Path,
) -> None:
    found = run_ranks(world, tmp_path, tiny_model, trajectories, "gradient", share)
    scale = max(float(np.abs(gradient).max()) for gradient in plain_gradient.values())
    assert plain_gradient.keys() <= found.keys()
    for name, gradient in plain_gradient.items():
        error = float(np.abs(found[name] - gradient).max())
        assert error < MAX_GRADIENT_ERROR * scale + 1e-7, f"{name}: {error} of {scale}"


def test_what_two_ranks_saved_is_restored_by_four_and_by_one_to_the_last_bit(
    tiny_model: Path, trajectories: Path, tmp_path: Path
) -> None:
    saved = run_ranks(2, tmp_path, tiny_model, trajectories, "save")
    restored = {world: run_ranks(world, tmp_path, tiny_model, trajectories, "load") for world in (1, 4)}
    for world, found in restored.items():
        for name, array in saved.items():
            assert np.array_equal(found[name], array), f"{name} on {world} ranks"
    moments = [name for name in restored[1] if name.startswith("moment.")]
    assert any(restored[1][name].any() for name in moments)
    assert all(np.array_equal(restored[1][name], restored[4][name]) for name in moments)
