"""What the system itself costs, without a model: python -m benchmarks.driver [--groups 1000 --steps 10]

Scripted engine, instant learner, verdicts for free; driver, store, rollout workers, object store and Ray are real.
Reports trajectories per second from the second step on, and the driver's memory after each step.
"""

from __future__ import annotations

import argparse
import json
import os

import psutil

from benchmarks.machine import describe
from benchmarks.stand_in_run import run
from rayapp.cluster import Cluster, StandIns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000, help="in flight, and per step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    rss_mib: list[float] = []
    process = psutil.Process(os.getpid())

    def remember(cluster: Cluster) -> None:
        rss_mib.append(process.memory_info().rss / 2**20)

    records = run(
        {
            "train": {"num_steps": args.steps, "groups_per_step": args.groups},
            "rollout": {
                "group_size": args.group_size,
                "max_prompt_tokens": 32,
                "max_completion_tokens": 64,
                "num_workers": args.workers,
            },
            "learner": {"max_tokens_per_microbatch": 256},
        },
        StandIns(),
        on_step=remember,
    )
    steady = records[1:] or records
    seconds = sum(record["timing_s/step"] for record in steady)
    report = {
        "settings": vars(args),
        "machine": describe(),
        "trajectories_per_s": len(steady) * args.groups * args.group_size / seconds,
        "step_s": [record["timing_s/step"] for record in records],
        "phases_s": {k: v for k, v in records[-1].items() if k.startswith("timing_s/")},
        "driver_rss_mib": rss_mib,
        "load_average": os.getloadavg(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
