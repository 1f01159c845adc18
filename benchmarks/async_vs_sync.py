"""Measures steps per second with max_staleness 0 and 1: the gain from generating while the learners train.

    python -m benchmarks.async_vs_sync                                     stand-ins, tools of 5 s, about eight minutes
    python -m benchmarks.async_vs_sync --tool-s 0 --generate-s 6 --train-s 8     stand-ins, no tools
    python -m benchmarks.async_vs_sync --config configs/coding_cpu.yaml    the real run, on this machine's own devices

Stand-ins for servers and learners sleep for the given seconds, as if each had its own device. Each trajectory then
waits for a tool, for a log-normal time. Driver, store, workers and Ray are real. Everything simulated sleeps, so the
ratio also holds on a busy machine. With --config nothing is simulated. Without GPUs, servers and learners then share
the cores, and the gain can only come from idle cores.

The first two steps are left out, because in both modes the first step waits for its rollouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.report import print_report
from benchmarks.stand_in_run import run
from support.stand_ins import stand_ins

NUM_WARM = 2
Records = list[dict[str, float]]


def simulate(args: argparse.Namespace, max_staleness: int) -> Records:
    """Train on stand-ins. Return the metrics of each step."""
    return run(
        {
            "train": {"num_steps": args.steps, "groups_per_step": 2, "max_staleness": max_staleness},
            "rollout": {"group_size": 16, "max_prompt_tokens": 32, "max_completion_tokens": 64, "num_workers": 1},
            "learner": {"max_tokens_per_microbatch": 256},
        },
        stand_ins(completion_s=args.generate_s, step_s=args.train_s),
        tool_mean_s=args.tool_s,
        tool_sigma=args.tool_sigma,
    )


def train(args: argparse.Namespace, max_staleness: int) -> Records:
    """Run `rayapp train`. Return the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "run.output_dir": folder,
            "run.name": "async",
            "train.num_steps": args.steps,
            "train.max_staleness": max_staleness,
            "checkpoint.every_steps": 0,
            "cluster.address": "local",
            "tracking.trackers": "[jsonl]",
        }
        overrides = [f"{key}={value}" for key, value in keys.items()]
        command = [sys.executable, "-m", "rayapp", "train", str(args.config), *overrides]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)
        return [json.loads(line) for line in (Path(folder) / "async" / "metrics.jsonl").read_text().splitlines()]


def summarize(records: Records, generate_s: float | None, train_s: float | None) -> dict[str, Any]:
    """Return seconds per step, and the shares of the time in which learners and servers were idle.

    Args:
        generate_s, train_s: seconds per step for which a stand-in sleeps; None takes them from the run's metrics.
    """
    steady = records[NUM_WARM:]
    step_s = statistics.fmean(record["timing_s/step"] for record in steady)
    if train_s is None:
        train_s = statistics.fmean(record["timing_s/train"] for record in steady)
    if generate_s is None:
        generate_s = statistics.fmean(min(record["timing_s/generate"], record["timing_s/step"]) for record in steady)
    return {
        "step_s": step_s,
        "steps_s": [record["timing_s/step"] for record in records],
        "learner_idle": max(0.0, 1 - train_s / step_s),
        "server_idle": max(0.0, 1 - generate_s / step_s),
        "staleness_max": max(record["staleness/max"] for record in records),
        "response_tokens_per_s": statistics.fmean(record["throughput/response_tokens_per_s"] for record in steady),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--generate-s", type=float, default=2.0)
    parser.add_argument("--train-s", type=float, default=10.0)
    parser.add_argument("--tool-s", type=float, default=5.0, help="mean")
    parser.add_argument("--tool-sigma", type=float, default=0.6, help="of its logarithm")
    parser.add_argument("--config", type=Path, help="of a real run, instead of stand-ins")
    args = parser.parse_args()
    if args.steps <= NUM_WARM:
        parser.error(f"--steps is {args.steps}, and the first {NUM_WARM} are left out")
    given = (None, None) if args.config else (args.generate_s, args.train_s)
    measure = train if args.config else simulate
    sync, overlapped = (summarize(measure(args, bound), *given) for bound in (0, 1))
    ratios = {"steps_per_s_of_synchronous": sync["step_s"] / overlapped["step_s"]}
    print_report(args, ratios, max_staleness_0=sync, max_staleness_1=overlapped)


if __name__ == "__main__":
    main()
