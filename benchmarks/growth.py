"""Cost of long trajectories over their number and length: python -m benchmarks.growth [--sizes 100,300,1000]

    python -m benchmarks.growth --sizes 100,300,1000        how many trajectories, of --turns turns each
    python -m benchmarks.growth --lengths 25,50,100,200     how many turns, of --tokens tokens each

Each trajectory passes through the recorder, the driver's summary, the learner's micro-batches and the trajectory
file, in a process of its own for each size. `forked` are trajectories of which every turn begins at an earlier token,
as when a chat template drops the reasoning of earlier turns: each turn is a branch of the learner's tree. A part is
linear if its processor time per token is the same at every size. The ratio of a part is smallest / largest size.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import ROOT
from benchmarks.report import parse_report, print_report
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Completion, Group, Prompt, Trajectory
from rayapp.learner.batch import TrainItem, split
from rayapp.rollout.recorder import Recorder
from rayapp.runs.trajectories import read_groups, write_trajectories

GROUP_SIZE = 10
PROMPT_TOKENS = 200
VOCABULARY = 49_152


def completion(ids: Any) -> Completion:
    return Completion(
        token_ids=ids, log_probs=np.full(ids.size, -0.5, np.float32), text="", finish_reason="stop", policy_version=3
    )


def play(random: np.random.Generator, prompt: Any, turns: int, tokens: int, *, forked: bool) -> Trajectory:
    """Record a trajectory of these turns: half of a turn's tokens are sampled, half are a tool's result.

    Args:
        forked: every turn reads all turns before it without the first half of what they sampled.
    """
    ids = random.integers(0, VOCABULARY, (turns, tokens), dtype=np.int32)
    recorder, half, read = Recorder(() if forked else prompt), tokens // 2, prompt
    for turn in ids:
        if forked:
            recorder.add_turn(-1, read.tolist(), completion(turn[:half]), text="text " * half, started_at_s=0.0)
            read = np.concatenate([read, turn[half // 2 :]])
        else:
            last = recorder.size - 1
            recorder.context(last)
            recorder.add_turn(last, (), completion(turn[:half]), text="text " * half, started_at_s=0.0)
            recorder.add_read(turn[half:].tolist())
    return recorder.trajectory()


def groups_of(random: np.random.Generator, args: argparse.Namespace) -> list[Group]:
    """Record all trajectories. The trajectories of a group share their prompt."""
    groups = []
    for number in range(args.trajectories // GROUP_SIZE):
        ids = random.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)
        prompt = Prompt(token_ids=ids, task="t", text="p")
        played = [play(random, ids, args.turns, args.tokens, forked=args.forked) for _ in range(GROUP_SIZE)]
        groups.append(Group(group_id=number, prompt=prompt, trajectories=tuple(played)))
    return groups


def items_of(groups: list[Group]) -> list[TrainItem]:
    """Return the trajectories as the learner's rows, with an advantage of 1."""
    rows = [(position, played) for position, group in enumerate(groups) for played in group.trajectories]
    return [
        TrainItem(row=row, group=group, trajectory=played, advantages=np.ones(played.num_response_tokens, np.float32))
        for row, (group, played) in enumerate(rows)
    ]


class Parts:
    """Processor seconds, and the process's peak memory so far, of the named parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_mib: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = work()
        self.seconds[name] = time.process_time() - started
        self.peak_mib[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take the trajectories through every part, and return each part's cost per million tokens."""
    parts = Parts()
    groups = parts.run("record", lambda: groups_of(np.random.default_rng(0), args))
    num_tokens = sum(played.num_tokens for group in groups for played in group.trajectories)
    parts.run("summarize", lambda: [summarize_group(group, time_total_s=1.0) for group in groups])
    most = max(played.num_tokens for group in groups for played in group.trajectories)
    items = items_of(groups)
    parts.run("micro-batches", lambda: len(split(items, max_tokens=4 * most, share_prefixes=True)))
    with tempfile.TemporaryDirectory(prefix="rayapp-growth-") as folder:
        file = Path(folder, "step=000001.parquet")
        write_trajectories(file, 1, groups[:1])  # a process spends a second on its first write
        parts.run("write", lambda: write_trajectories(file, 1, groups))
        parts.run("read", lambda: len(read_groups(file)))
    per_million = {name: 1e6 * seconds / num_tokens for name, seconds in parts.seconds.items()}
    return {"tokens": num_tokens, "s_per_million_tokens": per_million, "peak_mib": parts.peak_mib}


def measure_each(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each size in a process of its own. Print a line for each to standard error."""
    axis, values = ("turns", args.lengths) if args.lengths else ("trajectories", args.sizes)
    found: dict[str, Any] = {}
    for value in values.split(","):
        told = {"trajectories": args.trajectories, "turns": args.turns, "tokens": args.tokens} | {axis: value}
        options = [text for name, number in told.items() for text in (f"--{name}", str(number))]
        command = [sys.executable, "-m", "benchmarks.growth", *options, *(["--forked"] if args.forked else [])]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        found[value] = one = parse_report(done.stdout)
        costs = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one["s_per_million_tokens"].items())
        peaks = ", ".join(f"{name} {mib:.0f}" for name, mib in one["peak_mib"].items())
        print(f"{value} {axis}: s per million tokens: {costs}; peak MiB: {peaks}", file=sys.stderr, flush=True)
    return {value: {key: one[key] for key in one if key != "machine"} for value, one in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="", help="numbers of trajectories, smallest first")
    parser.add_argument("--lengths", default="", help="numbers of turns, smallest first")
    parser.add_argument("--trajectories", type=int, default=100, help=f"a multiple of {GROUP_SIZE}")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=320, help="tokens of a turn")
    parser.add_argument("--forked", action="store_true", help="every turn begins at an earlier token")
    args = parser.parse_args()
    if not (args.sizes or args.lengths):
        found = measure(args)
        print_report(args, {"tokens_over_seconds": found["tokens"] / 1e6}, **found)
        return
    by_size = measure_each(args)
    first, *_, last = [one["s_per_million_tokens"] for one in by_size.values()]
    print_report(args, {f"{name}_smallest_over_largest": first[name] / last[name] for name in first}, sizes=by_size)


if __name__ == "__main__":
    main()
