"""Cost of rayapp's own processes, without a model: python -m benchmarks.driver [--groups 1000 --steps 10]

    python -m benchmarks.driver --sizes 100,1000,10000      each in turn: is the cost linear, and is memory flat?

The engine is scripted, the learner takes no time, and verdicts cost nothing. Driver, store, rollout workers, object
store and Ray are real. Figures leave out the first step. Processor time per trajectory does not depend on the machine's
other load. The reported ratio divides it by the time of a fixed piece of plain Python
(benchmarks.machine.python_unit_s).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections import Counter
from typing import Any

import psutil

from benchmarks.machine import ROOT, python_unit_s
from benchmarks.report import parse_report, print_report
from benchmarks.stand_in_run import run
from rayapp.driver.cluster import Cluster
from support.stand_ins import stand_ins

GPU_RATES = (1.0, 5.0, 30.0)
"""Trajectories per second that one GPU finishes if they have 4,000, 800 or 130 tokens, at 4,000 tokens per second."""
ROLES = {
    "rollout workers": ("RolloutWorker", "rollout-worker"),
    "server": ("ScriptedServer", "vllm-server"),
    "learner": ("InstantLearner", "learner"),
    "sandbox pool": ("PoolActor", "sandbox-pool"),
}
"""Role -> prefixes of the titles of its processes: the title while a process waits, and while it works."""
GROUPS_PER_SIZE = 10_000
MIN_STEPS, MAX_STEPS = 3, 20

Sums = dict[str, float]


def role_of(process: psutil.Process, driver: psutil.Process) -> str:
    """Return a process's role: driver, one of ROLES, or `ray` for Ray's own processes."""
    if process == driver:
        return "driver"
    title = process.cmdline()[0].removeprefix("ray::")
    return next((role for role, begins in ROLES.items() if title.startswith(begins)), "ray")


def measure_roles(driver: psutil.Process) -> tuple[Counter[str], Counter[str]]:
    """Return processor seconds so far, and resident MiB, for each role. They include the driver and all processes that
    Ray started for it.
    """
    spent: Counter[str] = Counter()
    resident: Counter[str] = Counter()
    for process in [driver, *driver.children(recursive=True)]:
        try:
            role, times, memory = role_of(process, driver), process.cpu_times(), process.memory_info()
        except (psutil.Error, IndexError):
            continue
        spent[role] += times.user + times.system
        resident[role] += memory.rss / 2**20
    return spent, resident


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure one run with `--groups` groups in flight."""
    cpu_s: list[Counter[str]] = []
    rss_mib: list[Counter[str]] = []
    units_s: list[float] = []
    process = psutil.Process(os.getpid())

    def remember(cluster: Cluster) -> None:
        spent, resident = measure_roles(process)
        cpu_s.append(spent)
        rss_mib.append(resident)
        # Measure the unit of plain Python at every step, because the speed of a core can double within a minute.
        units_s.append(python_unit_s(rounds=4))

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
        stand_ins(),
        on_step=remember,
    )
    steady = records[1:]
    num_trajectories = len(steady) * args.groups * args.group_size
    spent = cpu_s[-1] - cpu_s[0]
    return {
        "trajectories_per_s": num_trajectories / sum(record["timing_s/step"] for record in steady),
        "trajectories_per_s_of_all_cores": len(os.sched_getaffinity(0)) * num_trajectories / spent.total(),
        "cpu_ms_per_trajectory": {role: 1000 * s / num_trajectories for role, s in spent.most_common()},
        "cpu_ms_per_trajectory_in_all": 1000 * spent.total() / num_trajectories,
        "step_s": [record["timing_s/step"] for record in records],
        "phases_s": {k: v for k, v in records[-1].items() if k.startswith("timing_s/")},
        "driver_rss_mib": [resident["driver"] for resident in rss_mib],
        "rss_mib_at_the_end": dict(rss_mib[-1].most_common()),
        "python_unit_ms": 1000 * statistics.median(units_s),
        "memory_early_over_late": early_over_late([resident["driver"] for resident in rss_mib]),
    }


def early_over_late(rss_mib: list[float]) -> float:
    """Return early memory / late memory. 1 means that memory is flat after the first step, 0.5 that it has doubled."""
    steady = rss_mib[1:]
    half = max(1, len(steady) // 2)
    return statistics.fmean(steady[:half]) / statistics.fmean(steady[-half:])


def extrapolation(driver_ms: float) -> dict[str, float]:
    """Return how many trajectories per second, and how many GPUs, would use up the one core of the driver process."""
    return {"trajectories_per_s": 1000 / driver_ms} | {
        f"gpus_at_{rate:g}_trajectories_per_s": 1000 / driver_ms / rate for rate in GPU_RATES
    }


def measure_size(groups: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one size in a separate process, so that memory of one size does not count for the next."""
    steps = min(MAX_STEPS, max(MIN_STEPS, 1 + GROUPS_PER_SIZE // groups))
    sizes = ("--groups", groups, "--steps", steps, "--group-size", args.group_size, "--workers", args.workers)
    command = [sys.executable, "-m", "benchmarks.driver", *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return parse_report(done.stdout)


def compare_sizes(sizes: list[int], args: argparse.Namespace) -> dict[str, Any]:
    """Measure each size. After each, print a line to standard error."""
    found: dict[int, dict[str, Any]] = {}
    for groups in sizes:
        found[groups] = one = measure_size(groups, args)
        costs = ", ".join(f"{role} {ms:.3f}" for role, ms in one["cpu_ms_per_trajectory"].items())
        late = ", ".join(f"{role} {mib:.0f}" for role, mib in one["rss_mib_at_the_end"].items())
        print(
            f"{groups:6} groups: {one['trajectories_per_s']:6.0f} trajectories/s; CPU ms per trajectory "
            f"{one['cpu_ms_per_trajectory_in_all']:.3f} ({costs}); MiB at the end: {late}",
            file=sys.stderr,
            flush=True,
        )
    return {str(groups): {key: one[key] for key in one if key != "machine"} for groups, one in found.items()}


def report_one(args: argparse.Namespace) -> None:
    found = measure(args)
    ratios = {
        "trajectories_per_unit_of_python": found["python_unit_ms"] / found["cpu_ms_per_trajectory_in_all"],
        "memory_early_over_late": found["memory_early_over_late"],
    }
    one_core = extrapolation(found["cpu_ms_per_trajectory"]["driver"])
    print_report(args, ratios, until_the_driver_is_full=one_core, **found)


def report_sizes(args: argparse.Namespace, sizes: list[int]) -> None:
    by_size = compare_sizes(sizes, args)
    first, last = by_size[str(sizes[0])], by_size[str(sizes[-1])]
    ratios = {
        "cost_smallest_over_largest": first["cpu_ms_per_trajectory_in_all"] / last["cpu_ms_per_trajectory_in_all"],
        "memory_early_over_late_of_largest": last["memory_early_over_late"],
    }
    one_core = extrapolation(last["cpu_ms_per_trajectory"]["driver"])
    print_report(args, ratios, until_the_driver_is_full=one_core, sizes=by_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1000, help="in flight, and per step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help=f"at least {MIN_STEPS}: the first is left out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sizes", default="", help="groups in flight, in turn; instead of --groups and --steps")
    args = parser.parse_args()
    if args.steps < MIN_STEPS:
        parser.error(f"--steps is {args.steps}; it must be at least {MIN_STEPS}, as the first step is left out")
    sizes = [int(size) for size in args.sizes.split(",") if size]
    if sizes:
        report_sizes(args, sizes)
    else:
        report_one(args)


if __name__ == "__main__":
    main()
