"""What the system itself costs, without a model: python -m benchmarks.driver [--groups 1000 --steps 10]

Scripted engine, instant learner, verdicts for free; driver, store, rollout workers, object store and Ray are real.
Reports trajectories per second from the second step on, the processor time of each role, which does not depend on what
else the machine does, and the driver's memory after each step.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from pathlib import Path

import psutil

from benchmarks.machine import describe
from benchmarks.stand_in_run import run
from rayapp.cluster import Cluster, StandIns


def cpu_seconds(driver: psutil.Process) -> Counter[str]:
    """Processor time so far of the driver and everything that Ray started for it, by role."""
    spent: Counter[str] = Counter()
    for process in [driver, *driver.children(recursive=True)]:
        try:
            times, title = process.cpu_times(), " ".join(process.cmdline()[:1])
        except psutil.Error:
            continue
        role = "driver" if process == driver else Path(title).name.split(".")[0].split("-")[0]
        spent[role] += times.user + times.system
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000, help="in flight, and per step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    rss_mib: list[float] = []
    cpu_s: list[Counter[str]] = []
    process = psutil.Process(os.getpid())

    def remember(cluster: Cluster) -> None:
        rss_mib.append(process.memory_info().rss / 2**20)
        cpu_s.append(cpu_seconds(process))

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
    spent = cpu_s[-1] - cpu_s[0]
    num_trajectories = len(steady) * args.groups * args.group_size
    report = {
        "settings": vars(args),
        "machine": describe(),
        "trajectories_per_s": num_trajectories / seconds,
        "cpu_ms_per_trajectory": {role: 1000 * s / num_trajectories for role, s in spent.most_common()},
        "trajectories_per_s_of_all_cores": len(os.sched_getaffinity(0)) * num_trajectories / spent.total(),
        "step_s": [record["timing_s/step"] for record in records],
        "phases_s": {k: v for k, v in records[-1].items() if k.startswith("timing_s/")},
        "driver_rss_mib": rss_mib,
        "load_average": os.getloadavg(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
