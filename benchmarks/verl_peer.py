"""Runs verl's GRPO for `grpo_step.py`: steps of the same size, with the same model and prompts, before rayapp's actors
take the GPU.

verl starts its own Ray and engine, so it can't wait beside another trainer as TRL does; its run comes first and ends.
Its interpreter needs `verl==0.9.1`, `vllm` and `transferqueue`. Its reward is a checksum of the text: it runs no code,
which takes rayapp and TRL about 0.05 s of a step.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

VERL_VERSION = "0.9.1"
RUN_TIMEOUT_S = 1800.0
REWARD = """import zlib


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return zlib.crc32(solution_str.encode()) % 1000 / 1000
"""
# Parts of rayapp's step, by verl's names of its own.
PARTS = {
    "gen": "generate",
    "reward": "score",
    "old_log_prob": "old_log_probs",
    "update_actor": "forward_backward",
    "update_weights": "weight_sync",
}
_METRIC = re.compile(r"([\w/.]+):(?:np\.float64\()?([-+\d.eE]+)")


def run_verl(python: Path, work: dict[str, Any], messages: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
    """Train `work["num_steps"]` steps; return the seconds, completion tokens and parts of each but the first, which
    compiles. RuntimeError: verl ended before the last step."""
    folder = Path(work["output_dir"]) / "verl"
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    write_rows(folder / "rows.parquet", messages, num_rows=work["num_steps"] * work["groups_per_step"])
    log = folder.parent / "verl.log"
    with log.open("w") as out:
        command = [str(python), "-m", "verl.trainer.main_ppo", *arguments(work, folder)]
        done = subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=RUN_TIMEOUT_S,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    steps = read_steps(log.read_text(errors="replace"), num_completions=work["groups_per_step"] * work["group_size"])
    if len(steps) < work["num_steps"]:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"verl ended with exit code {done.returncode} after {len(steps)} steps:\n{tail}")
    return steps[1:]


def write_rows(path: Path, messages: list[list[dict[str, str]]], *, num_rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "benchmark",
            "prompt": messages[index % len(messages)],
            "ability": "code",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index, "split": "train"},
        }
        for index in range(num_rows)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def arguments(work: dict[str, Any], folder: Path) -> list[str]:
    """Return Hydra's overrides: full fine-tuning without KL, no padding removal and torch's attention, because
    flash-attn has no wheel for this torch; float32 masters, as rayapp's."""
    policy, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    tokens = work["max_prompt_tokens"] + work["max_completion_tokens"]
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder / 'rows.parquet'}",
        f"data.val_files={folder / 'rows.parquet'}",
        f"data.train_batch_size={work['groups_per_step']}",
        f"data.max_prompt_length={work['max_prompt_tokens']}",
        f"data.max_response_length={work['max_completion_tokens']}",
        "data.filter_overlong_prompts=False",
        f"actor_rollout_ref.model.path={work['model']}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{policy}.optim.lr={work['lr']}",
        f"{policy}.strategy=fsdp2",
        f"{policy}.ppo_mini_batch_size={work['groups_per_step']}",
        f"{policy}.use_dynamic_bsz=True",
        f"{policy}.ppo_max_token_len_per_gpu={max(8192, tokens)}",
        f"{policy}.use_kl_loss=False",
        f"{policy}.entropy_coeff=0",
        f"{rollout}.name=vllm",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization={work['gpu_memory_utilization']}",
        f"{rollout}.n={work['group_size']}",
        f"{rollout}.log_prob_use_dynamic_bsz=True",
        f"{rollout}.log_prob_max_token_len_per_gpu={max(16384, tokens)}",
        f"{rollout}.max_num_seqs={work['groups_per_step'] * work['group_size']}",
        f"{rollout}.max_model_len={work['max_model_tokens']}",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "reward.custom_reward_function.name=compute_score",
        'trainer.logger=["console"]',
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        f"trainer.total_training_steps={work['num_steps']}",
        "trainer.total_epochs=1",
        f"trainer.default_local_dir={folder}",
    ]


def read_steps(console: str, *, num_completions: int) -> list[dict[str, Any]]:
    """Read verl's lines `step:1 - timing_s/step:2.3 - ...`."""
    steps = []
    for line in console.splitlines():
        metrics = {name: float(value) for name, value in _METRIC.findall(line)} if "timing_s/step:" in line else {}
        if metrics:
            steps.append(
                {
                    "step": metrics["timing_s/step"],
                    "completion_tokens": round(metrics["response_length/mean"] * num_completions),
                    "parts": {ours: metrics.get(f"timing_s/{theirs}", 0.0) for theirs, ours in PARTS.items()},
                }
            )
    return steps
