"""The memory plan against the kernel's counts: the peak of a learner's resident memory over two steps on a CPU.

test_token_budget.py compares torch's allocations, far more tightly. This file checks the rest of a process's memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rayapp.config.config import Config
from rayapp.learner.memory.plan import gathered_bytes, plan_learner
from rayapp.learner.memory.shape import model_shape
from support.learners import save_llama

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_PLAN_ERROR = 0.10
"""As in test_token_budget.py."""
LIBRARIES = 64 * 2**20
"""What a process has beyond what torch allocates: pages of torch's code and of its matrix library that the first step
touches, 27 MiB and more, and malloc's rests."""

STEPS = '''
"""Two steps; prints the bytes that a learner added to this process at its peak."""
import ctypes, json, sys
from pathlib import Path
import numpy as np
from rayapp.config.config import Config
from rayapp.core.machine import M_MMAP_MAX, M_TOP_PAD, M_TRIM_THRESHOLD, trim_heap
from rayapp.learner.build import build_learner
from rayapp.learner.distributed import end_ranks, start_ranks
from rayapp.learner.shares import Share
from rayapp.learner.policy import load_policy
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group, Prompt, Reward, RolloutStatus, Trajectory
import verl.trainer.ppo.core_algos, verl.workers.config  # 57 MiB of modules that the first step would load

M_MMAP_THRESHOLD = -3

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

config = Config.model_validate(json.loads(sys.argv[1]))
rng = np.random.default_rng(0)
tokens = [rng.integers(2, 4000, 129).astype(np.int32) for _ in range(32)]
groups = [
    Group(
        group_id=g,
        prompt=Prompt(task="t", text="", token_ids=np.arange(1, dtype=np.int32)),
        trajectories=tuple(
            Trajectory(token_ids=ids, response_mask=np.arange(129) >= 1, completion_text="",
                       rollout_log_probs=np.where(np.arange(129) >= 1, -8.0, 0.0).astype(np.float32),
                       reward=Reward(value=float(i)), status=RolloutStatus.COMPLETED,
                       min_policy_version=0, max_policy_version=0)
            for i, ids in enumerate(tokens[8 * g : 8 * g + 8])
        ),
    )
    for g in range(4)
]
summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
ranks = start_ranks(config, 0, 1, "", 0)
# malloc as it comes: the learner's own setting keeps freed pieces that nothing fits into (rayapp.core.machine), which
# are no part of the plan.
malloc = ctypes.CDLL(None)
options = ((M_MMAP_MAX, 65536), (M_MMAP_THRESHOLD, 1 << 20), (M_TRIM_THRESHOLD, 1 << 17), (M_TOP_PAD, 1 << 17))
for option, value in options:
    malloc.mallopt(option, value)
trim_heap()
load_policy(config, ranks.mesh, trainable=False)  # what imports and a first load cost is not the learner's
before = status("VmRSS")
learner = build_learner(config, ranks)
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
for step in (1, 2):
    learner.train_step(step, summaries, tuple(map(Share, range(4))), groups)
print(json.dumps({"peak": status("VmHWM") - before}))
end_ranks()
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers: activations are most of a step, as they are for real models."""
    folder = tmp_path_factory.mktemp("model")
    return save_llama(
        folder, dtype="bfloat16", vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=6
    )


@pytest.mark.parametrize(
    "learner",
    [{}, {"activation_checkpointing": True}, {"lora": {"rank": 16}}],
    ids=["plain", "activation checkpointing", "adapters"],
)
def test_a_process_takes_what_the_plan_says(model: Path, learner: dict[str, object]) -> None:
    settings = {
        "model": {"path": str(model)},
        "cluster": {"device": "cpu"},
        "rollout": {"group_size": 8, "max_prompt_tokens": 16, "max_completion_tokens": 128},
        "learner": {"compute_dtype": "float32", "cpu_threads": 1, "max_tokens_per_microbatch": 4096, **learner},
    }
    config = Config.model_validate(settings)
    shape = model_shape(config)
    plan = plan_learner(shape, config)
    # On CPU every layer stays gathered, the float32 softmax takes 64 rows at a time, and one rank reduces nothing.
    head, backward, _ = plan.moments
    softmax = 8 * (config.learner.log_prob_chunk_tokens - 64) * shape.vocabulary
    working = max(head.activations + head.head - softmax, backward.activations + backward.head)
    gathered = gathered_bytes(shape, config.learner, shape.num_layers)
    planned = plan.resident - plan.runtime + plan.gradients + gathered + working

    done = subprocess.run(
        [sys.executable, "-c", STEPS, json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )

    assert done.returncode == 0, done.stderr
    peak = json.loads(done.stdout.splitlines()[-1])["peak"]
    # Not below: tensors that torch has allocated and filled are resident.
    least, most = (1 - MAX_PLAN_ERROR) * planned, (1 + MAX_PLAN_ERROR) * planned + LIBRARIES
    assert least < peak < most, f"{peak / 2**20:.0f} of {planned / 2**20:.0f} MiB planned"
