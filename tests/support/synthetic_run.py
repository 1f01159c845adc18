"""A run folder of any size with made-up trajectories, for benchmarks/view.py and for looking at the page by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayapp.runs.trajectories import ROWS_PER_ROW_GROUP, SCHEMA

TASKS = ("sort_numbers", "max_subarray_sum", "gsm8k", "median", "rotate")
STATUSES = ("scored", "scored", "scored", "scored", "error", "timeout", "syntax_error", "banned")
GROUP_SIZE = 16
PROMPT_TOKENS, RESPONSE_TOKENS = 80, 120


def write_run(folder: Path, *, num_trajectories: int, per_step: int = 1024, seed: int = 0) -> int:
    """Write whole steps until there are so many trajectories; return the number of steps.

    Args:
        folder: must not exist.
        per_step: trajectories of a step; a multiple of 16.
    """
    random = np.random.default_rng(seed)
    (folder / "trajectories").mkdir(parents=True)
    heavy = _tokens(random, per_step)
    num_steps = -(-num_trajectories // per_step)
    for step in range(1, num_steps + 1):
        columns = _scalars(random, step, per_step) | heavy
        table = pa.table([columns[name].cast(SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA)
        path = folder / "trajectories" / f"step={step:06d}.parquet"
        pq.write_table(table, path, compression="zstd", row_group_size=ROWS_PER_ROW_GROUP)
    _write_metrics(folder, random, num_steps)
    (folder / "config.yaml").write_text(f"run: {{name: synthetic}}\ntrain: {{num_steps: {num_steps}}}\n")
    return num_steps


def _tokens(random: np.random.Generator, rows: int) -> dict[str, Any]:
    """Return columns that are read only when a trajectory is opened: equal in every step, of realistic size."""
    length = PROMPT_TOKENS + RESPONSE_TOKENS
    ids = random.integers(0, 49152, (rows, length), dtype=np.int32)
    log_probs = np.where(np.arange(length) < PROMPT_TOKENS, 0.0, -random.exponential(0.5, (rows, length)))
    mask = np.broadcast_to(np.arange(length) >= PROMPT_TOKENS, (rows, length))
    texts = [" ".join(f"word{word}" for word in row) for row in random.integers(0, 500, (rows, RESPONSE_TOKENS))]
    return {
        "completion": pa.array(texts),
        "token_ids": pa.array(list(ids)),
        "response_mask": pa.array(list(mask)),
        "rollout_log_probs": pa.array(list(log_probs.astype(np.float32))),
        "learner_log_probs": pa.array(list((0.99 * log_probs).astype(np.float32))),
    }


def _scalars(random: np.random.Generator, step: int, rows: int) -> dict[str, Any]:
    groups = np.arange(rows) // GROUP_SIZE + (step - 1) * (rows // GROUP_SIZE)
    solved = random.random(rows) < 0.2 + 0.6 * step / (step + 200)
    rewards = np.where(solved, 1.0, random.choice([-1.0, 0.0, 0.5], rows))
    tasks = [TASKS[group % len(TASKS)] for group in groups]
    terms = [[("pass_rate", max(0.0, reward)), ("solved", float(reward == 1))] for reward in rewards.tolist()]
    same = {"index": np.arange(rows) % GROUP_SIZE, "step": np.full(rows, step), "group_id": groups, "reward": rewards}
    empty = [name for name in SCHEMA.names if SCHEMA.field(name).type == pa.string()]
    texts = dict.fromkeys(empty, "") | {"status": "completed"}
    numbers = {
        "num_prompt_tokens": PROMPT_TOKENS,
        "num_response_tokens": RESPONSE_TOKENS,
        "num_turns": 1,
        "min_policy_version": step - 1,
        "max_policy_version": step - 1,
        "time_generate_s": 4.0,
        "time_score_s": 0.1,
    }
    prompts = [f"<|im_start|>user\n{task}: problem {group % 5000}" for task, group in zip(tasks, groups, strict=True)]
    return (
        {name: pa.array(values) for name, values in same.items()}
        | {name: pa.array([value] * rows) for name, value in (texts | numbers).items()}
        | {
            "task": pa.array(tasks),
            "prompt": pa.array(prompts),
            "stop": pa.array([[]] * rows, SCHEMA.field("stop").type),
            "turns": pa.array([[]] * rows, SCHEMA.field("turns").type),
            "forks": pa.array([[]] * rows, SCHEMA.field("forks").type),
            "routed_experts": pa.nulls(rows, SCHEMA.field("routed_experts").type),
            "allowed": pa.nulls(rows, SCHEMA.field("allowed").type),
            "media": pa.nulls(rows, SCHEMA.field("media").type),
            "reward_terms": pa.array(terms, SCHEMA.field("reward_terms").type),
            "reward_status": pa.array(np.array(STATUSES)[random.integers(0, len(STATUSES), rows)]),
            "valid": pa.array([True] * rows),
        }
    )


def _write_metrics(folder: Path, random: np.random.Generator, num_steps: int) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            reward = step / (step + 200) + random.normal(0, 0.05)
            values = {"reward/mean": reward, "reward/solved/mean": reward / 2, "learner/entropy": 200 / (step + 200)}
            others = {f"timing_s/{name}": random.random() for name in ("step", "generate", "train", "score")}
            record = {"step": step, "time": 1.8e9 + step} | values | others
            file.write(json.dumps(record) + "\n")
