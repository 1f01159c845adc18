"""Steps per second with max_staleness 0 and 1 where tools are slow: python -m benchmarks.async_vs_sync [--steps 12]

Servers and learners are stand-ins that take the seconds given here (by default those of the CPU config: 2 s to
generate, 10 s to train), tools take log-normal seconds of mean 5. Driver, store, workers and Ray are real. All of it
sleeps, so the ratio holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks.machine import describe
from benchmarks.stand_in_run import run
from rayapp.cluster import StandIns


def measure(args: argparse.Namespace, max_staleness: int) -> dict[str, float]:
    """Seconds per step, and which share of the time the learners and the servers had nothing to do."""
    records = run(
        {
            "train": {"num_steps": args.steps, "groups_per_step": 2, "max_staleness": max_staleness},
            "rollout": {"group_size": 16, "max_prompt_tokens": 32, "max_completion_tokens": 64, "num_workers": 1},
            "learner": {"max_tokens_per_microbatch": 256},
        },
        StandIns(completion_s=args.generate_s, step_s=args.train_s),
        tool_mean_s=args.tool_s,
        tool_sigma=args.tool_sigma,
    )
    # The first step waits for its rollouts in either mode.
    steady = records[1:]
    step_s = sum(record["timing_s/step"] for record in steady) / len(steady)
    generating_s = min(step_s, args.generate_s)
    return {
        "step_s": step_s,
        "learner_idle": 1 - args.train_s / step_s,
        "server_idle": 1 - generating_s / step_s,
        "staleness_max": max(record["staleness/max"] for record in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--generate-s", type=float, default=2.0)
    parser.add_argument("--train-s", type=float, default=10.0)
    parser.add_argument("--tool-s", type=float, default=5.0)
    parser.add_argument("--tool-sigma", type=float, default=0.6)
    args = parser.parse_args()
    found: dict[str, Any] = {f"max_staleness={bound}": measure(args, bound) for bound in (0, 1)}
    found["ratio"] = found["max_staleness=0"]["step_s"] / found["max_staleness=1"]["step_s"]
    print(json.dumps({"settings": vars(args), "machine": describe(), **found}, indent=2))


if __name__ == "__main__":
    main()
