"""The plan beside the learner's own step on fake tensors, and that step beside small real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.learner.memory.plan import plan_learner
from rayapp.learner.memory.shape import model_shape
from support.learners import save_llama
from support.simulation import simulate_learner

MAX_PLAN_ERROR = 0.10
ROOT = Path(__file__).parents[3]
ARCHITECTURES = ROOT / "tests" / "data" / "architectures"
MakeConfig = Callable[..., Config]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A config of a checked-in architecture, with other layers in its config.json where asked for."""

    def make(
        name: str,
        num_learners: int,
        *,
        layers: int = 0,
        kl: float = 0.0,
        teacher: str = "",
        prompt_tokens: int = 1024,
        quantization: str = "none",
        **learner: Any,
    ) -> Config:
        architecture = json.loads((ARCHITECTURES / f"{name}.json").read_text())
        architecture["num_hidden_layers"] = layers or architecture["num_hidden_layers"]
        (tmp_path / "config.json").write_text(json.dumps(architecture))
        return Config.model_validate(
            {
                "model": {"path": str(tmp_path), "quantization": quantization},
                "algorithm": {"kl_loss_coef": kl},
                "distillation": {"teacher": str(tmp_path), "kl_over": teacher} if teacher else {},
                "rollout": {"group_size": 8, "max_prompt_tokens": prompt_tokens, "max_completion_tokens": 3072},
                "learner": {"num_learners": num_learners, "max_tokens_per_microbatch": 8192, **learner},
            }
        )

    return make


def check_plan(config: Config) -> None:
    plan, found = plan_learner(model_shape(config), config), simulate_learner(config)
    assert plan.total - plan.runtime == pytest.approx(found.peak, rel=MAX_PLAN_ERROR)
    assert plan.resident - plan.runtime == pytest.approx(found.resident, rel=0.01, abs=2**20)
    assert plan.host == pytest.approx(found.host, rel=0.01)


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": True},
    "first-layer-recomputed": {"activation_checkpointing": 1},
    "adapters": {"lora": {"rank": 32}, "activation_checkpointing": True},
    "four-bits": {"quantization": "nf4", "lora": {"rank": 32}, "activation_checkpointing": True},
    "four-bits-and-reference": {"quantization": "nf4", "lora": {"rank": 32}, "kl": 0.01},
    "offloaded": {"cpu_offload": True, "activation_checkpointing": True},
    "reference": {"kl": 0.01, "activation_checkpointing": True},
    "teacher": {"teacher": "sampled", "activation_checkpointing": True},
    "teacher-of-the-vocabulary": {"teacher": "vocabulary", "activation_checkpointing": True},
    # The plan counts a logit row for each token: prompts, which have none, may be as short as this.
    "whole-heads": {"log_prob_chunk_tokens": 8192, "activation_checkpointing": True, "prompt_tokens": 64},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_the_plan_of_two_layers_of_8b_on_8_gpus_is_what_the_learner_allocates(
    make_config: MakeConfig, changes: dict[str, Any]
) -> None:
    check_plan(make_config("qwen3-8b", 8, layers=2, **changes))


@pytest.mark.parametrize("layout", ["replicas", "sequence_parallel"])
def test_the_plan_of_ranks_in_pairs_is_what_the_learner_allocates(make_config: MakeConfig, layout: str) -> None:
    check_plan(make_config("qwen3-8b", 8, layers=2, **{layout: 2}))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(
    ("name", "num_learners"), [("qwen2.5-0.5b", 8), ("qwen2.5-3b", 8), ("qwen3-8b", 8), ("llama-3.1-70b", 64)]
)
def test_the_plan_is_what_the_learner_allocates_at_full_size(
    make_config: MakeConfig, name: str, num_learners: int, changes: dict[str, Any]
) -> None:
    check_plan(make_config(name, num_learners, **changes))


RANKS = '''
"""A rank of two over gloo: takes a step and prints the bytes of its shards."""
import json, sys
import torch.multiprocessing as mp
from rayapp.config.config import Config
from rayapp.learner.build import build_learner
from rayapp.learner.distributed import end_ranks, start_ranks
from support.simulation import full_step
from support.ports import free_port

def local(tensors):
    return sum(tensor.to_local().nbytes for tensor in tensors)

def rank(number, settings, port):
    config = Config.model_validate(settings)
    ranks = start_ranks(config, number, 2, "127.0.0.1", port)
    learner = build_learner(config, ranks)
    learner.optimizer.zero_grad = lambda: None
    learner.train_step(1, *full_step(config))
    trained = [p for p in learner.model.parameters() if p.requires_grad]
    if number == 0:
        print(json.dumps({
            "weights": local(learner.model.parameters()),
            "gradients": local(p.grad for p in trained),
            "optimizer": local(s[k] for s in learner.optimizer.state.values() for k in ("exp_avg", "exp_avg_sq")),
        }))
    end_ranks()

if __name__ == "__main__":
    mp.spawn(rank, (json.loads(sys.argv[1]), free_port()), nprocs=2)
'''


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "learner", [{}, {"lora": {"rank": 8}}, {"cpu_offload": True}], ids=["plain", "lora", "offload"]
)
def test_the_simulated_shards_are_those_of_two_real_ranks(tmp_path: Path, learner: dict[str, Any]) -> None:
    model = save_llama(tmp_path / "model", vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3)
    settings = {
        "model": {"path": str(model)},
        "cluster": {"device": "cpu"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 16, "max_completion_tokens": 16},
        "learner": {"num_learners": 2, "cpu_threads": 1, "max_tokens_per_microbatch": 128, **learner},
    }
    program = tmp_path / "ranks.py"  # spawned processes import it
    program.write_text(RANKS)

    done = subprocess.run(
        [sys.executable, str(program), json.dumps(settings)],
        capture_output=True, text=True, check=False, env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PATH": ""},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout.splitlines()[-1])
    found = simulate_learner(Config.model_validate(settings))
    assert {kind: getattr(found, kind) for kind in real} == real
