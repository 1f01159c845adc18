"""Our learner against a plain padded one, on the recorded trajectories of a run: same model, cores and tokens.

    python benchmarks/learner.py RUN [--config configs/coding_cpu.yaml] [--steps 3] [--rounds 3] [--json] [KEY=VALUE …]

RUN is a run folder with trajectories. Groups whose rewards are equal are left out for both: we would skip them. The
padded learner is what one writes first: transformers with SDPA under bfloat16 autocast, rows padded to the longest of
the batch, whole logits, fused AdamW. They alternate; shown are medians over rounds after one of warming up. Tokens are
those of the trajectories, however many each computes. `--tokens-only` counts what prefix sharing saves; nothing trains.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import numpy as np

from rayapp.config import Config
from rayapp.config_loading import load_config
from rayapp.dynamic_sampling import has_signal
from rayapp.learner.batch import TrainItem, split
from rayapp.rollout.group import summarize_group
from rayapp.tracking.trajectories import read_groups
from rayapp.types import Group

PADDED_ROWS = 8
"""Rows of a padded micro-batch."""


def recorded_steps(run: Path, num_steps: int) -> list[list[Group]]:
    """The last steps' groups that teach something: later completions are what most of a run computes."""
    steps = []
    for file in sorted((run / "trajectories").glob("step=*.parquet"))[-num_steps:]:
        groups = [g for g in read_groups(file) if has_signal(summarize_group(g, time_total_s=0.0))]
        if groups:
            steps.append(groups)
    if not steps:
        raise SystemExit(f"{run} has no recorded group whose rewards differ")
    return steps


def items_of(groups: Sequence[Group]) -> list[TrainItem]:
    """All trainable trajectories."""
    rows = [(g, t) for g, group in enumerate(groups) for t in group.trajectories if t.is_trainable]
    ones = [np.ones(t.num_response_tokens, np.float32) for _, t in rows]
    return [TrainItem(row=i, group=g, trajectory=t, advantages=ones[i]) for i, (g, t) in enumerate(rows)]


def token_counts(groups: Sequence[Group], config: Config) -> dict[str, float]:
    """What each way of laying out computes. Exact: nothing is timed."""
    items, budget = items_of(groups), config.learner.max_tokens_per_microbatch
    counts = {
        name: sum(batch.packing.num_tokens for batch in split(items, max_tokens=budget, share_prefixes=share))
        for name, share in (("shared", True), ("packed", False))
    }
    padded = len(items) * max(item.num_inputs for item in items)
    return {
        "tokens": float(counts["packed"]),
        "computed_shared": float(counts["shared"]),
        "computed_padded": float(padded),
        "saved_by_sharing": 1 - counts["shared"] / counts["packed"],
        "packing_efficiency": sum(item.num_inputs for item in items) / counts["packed"],
        "padded_efficiency": counts["packed"] / padded,
    }


def tokens_by_task(run: Path, config: Config) -> dict[str, dict[str, float]]:
    """Over all recorded steps, by the task of the group."""
    by_task: dict[str, list[dict[str, float]]] = {}
    for file in sorted((run / "trajectories").glob("step=*.parquet")):
        for group in read_groups(file):
            if any(t.is_trainable for t in group.trajectories):
                by_task.setdefault(group.prompt.task, []).append(token_counts([group], config))
    totals: dict[str, dict[str, float]] = {}
    for task, counts in sorted(by_task.items()):
        packed, shared = (sum(c[name] for c in counts) for name in ("tokens", "computed_shared"))
        totals[task] = {"groups": float(len(counts)), "tokens": packed, "saved_by_sharing": 1 - shared / packed}
    return totals


class PaddedLearner:
    """See the module."""

    def __init__(self, config: Config) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learner.optimizer.lr, fused=True)

    def step(self, groups: Sequence[Group]) -> None:
        torch = self._torch
        rows = [(t, a) for group in groups for t, a in zip(group.trajectories, advantages(group), strict=True)]
        width = max(t.num_tokens for t, _ in rows)
        total = sum(t.num_response_tokens for t, _ in rows)
        for start in range(0, len(rows), PADDED_ROWS):
            part = rows[start : start + PADDED_ROWS]
            tokens, attended = torch.zeros(2, len(part), width, dtype=torch.long)
            mask = torch.zeros(len(part), width)
            for i, (t, _) in enumerate(part):
                tokens[i, : t.num_tokens] = torch.from_numpy(t.token_ids.astype(np.int64))
                attended[i, : t.num_tokens] = 1
                mask[i, : t.num_tokens] = torch.from_numpy(t.response_mask.astype(np.float32))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(tokens, attention_mask=attended).logits[:, :-1]
            log_probs = logits.float().log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
            weights = torch.tensor([a for _, a in part])[:, None]
            (-(weights * log_probs * mask[:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def advantages(group: Group) -> list[float]:
    rewards = np.array([t.reward.value for t in group.trajectories])
    return [float(a) for a in (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)]


def flops(config: Config, groups: Sequence[Group]) -> float:
    """Of our step's matrix products: 6 a weight and token, the head where a response is predicted; no attention."""
    from rayapp.plan_command import model_shape

    shape = model_shape(config)
    batches = split(items_of(groups), max_tokens=config.learner.max_tokens_per_microbatch, share_prefixes=True)
    layers = shape.num_layers * shape.num_layer_parameters * sum(b.packing.num_tokens for b in batches)
    head = shape.vocabulary * shape.hidden * sum(b.head_positions.size for b in batches)
    return 6.0 * (layers + head)


def compare(config: Config, steps: Sequence[Sequence[Group]], rounds: int) -> dict[str, Any]:
    """Alternating rounds over the same steps."""
    from actors.learner import Learner

    ours, padded = Learner(config, 0, 1, "", 0), PaddedLearner(config)
    seconds: dict[str, list[float]] = {"ours": [], "padded": []}
    for number in range(rounds + 1):
        for name, measured in seconds.items():
            started = time.perf_counter()
            for step, groups in enumerate(steps, start=1):
                if name == "ours":
                    summaries = tuple(summarize_group(g, time_total_s=0.0) for g in groups)
                    ours.train_step(step, summaries, (tuple(range(len(groups))),), *groups)
                else:
                    padded.step(groups)
            if number:  # the first warms up
                measured.append(time.perf_counter() - started)
    ours.close()
    tokens = sum(int(t.num_tokens) for groups in steps for g in groups for t in g.trajectories)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    limits = machine.measure_limits()
    achieved = sum(flops(config, groups) for groups in steps) / median["ours"] / 1e9
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": {name: tokens / value for name, value in median.items()},
        "ratio": median["padded"] / median["ours"],
        "gflops": achieved,
        "share_of_gemm_peak": achieved / limits["gemm_bfloat16_gflops"],
        "limits": limits,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--config", type=Path, default=Path("configs/coding_cpu.yaml"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    result: dict[str, Any] = {"machine": machine.describe(), "tokens_by_task": tokens_by_task(arguments.run, config)}
    if not arguments.tokens_only:
        steps = recorded_steps(arguments.run, arguments.steps)
        result |= {"layout": token_counts([g for s in steps for g in s], config)}
        result |= compare(config, steps, arguments.rounds)
    json.dump(result, sys.stdout, indent=None if arguments.json else 2)
    print()


if __name__ == "__main__":
    main()
