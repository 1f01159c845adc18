"""The benchmark against verl gives its trainer a config that it takes, and reads its console."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import verl.trainer
from hydra import compose, initialize_config_dir
from verl.utils.logger.aggregate_logger import concat_dict_to_str

from benchmarks.verl_peer import arguments, read_steps

WORK = {
    "model": "/models/one",
    "groups_per_step": 2,
    "group_size": 16,
    "max_prompt_tokens": 128,
    "max_completion_tokens": 96,
    "max_model_tokens": 256,
    "gpu_memory_utilization": 0.4,
    "lr": 3e-5,
    "num_steps": 6,
}


def test_verl_takes_the_benchmarks_overrides(tmp_path: Path) -> None:
    folder = Path(verl.trainer.__path__[0]) / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=arguments(WORK, tmp_path))

    assert config.actor_rollout_ref.rollout.n == 16
    assert config.actor_rollout_ref.actor.optim.lr == 3e-5
    assert config.reward.custom_reward_function.path == str(tmp_path / "reward.py")
    assert config.trainer.logger == ["console"]


def test_seconds_tokens_and_parts_are_read_from_verls_console() -> None:
    metrics = {"timing_s/step": 7.25, "timing_s/gen": 3.5, "timing_s/update_actor": np.float64(2.5)}
    line = concat_dict_to_str({"response_length/mean": 40.5, **metrics}, step=1)

    (step,) = read_steps(f"(TaskRunner pid=1) {line}\nstep:2 - loss:1\n", num_completions=32)

    assert (step["step"], step["completion_tokens"]) == (7.25, 1296)
    assert (step["parts"]["generate"], step["parts"]["forward_backward"]) == (3.5, 2.5)
