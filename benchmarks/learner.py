"""Speed of rayapp's learner and of a plain padded learner, on the recorded trajectories of a run, with the same model,
cores and tokens.

    python benchmarks/learner.py RUN [--config configs/coding_cpu.yaml] [--ranks 2] [--steps 2] [--groups 4]
                                     [--rounds 3] [--tokens-only] [--json] [KEY=VALUE …]

RUN is a run folder with trajectories. Groups with equal rewards are left out for both learners, because rayapp's would
skip them. Of the other groups, `steps` x `groups` are drawn evenly over the run, so that lengths are distributed as in
the run. Both learners are in the same `ranks` processes and get the same groups; the padded one is in
padded_learner.py. They alternate. The figures are medians over rounds after one warm-up step. Tokens per second count
the tokens of the trajectories, not padding or recomputation. With `--tokens-only` nothing trains: the output has the
tokens that prefix sharing saves, and how full micro-batches are.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import numpy as np

from rayapp.config.config import Config
from rayapp.config.loading import load_config
from rayapp.core.trajectories import summarize_group
from rayapp.core.types import Group
from rayapp.driver.group_rules import has_signal
from rayapp.learner.batch import TrainItem, split
from rayapp.runs.trajectories import read_groups
from support.ports import free_port


def recorded_steps(run: Path, num_steps: int, num_groups: int) -> list[list[Group]]:
    """Return groups with unequal rewards, drawn evenly over the run, in steps of `num_groups`."""
    taught = [
        group
        for file in sorted((run / "trajectories").glob("step=*.parquet"))
        for group in read_groups(file)
        if has_signal(summarize_group(group, time_total_s=0.0))
    ]
    wanted = num_steps * num_groups
    if len(taught) < wanted:
        raise SystemExit(f"{run} has {len(taught)} recorded groups whose rewards differ, but {wanted} are asked for")
    chosen = [taught[i * len(taught) // wanted] for i in range(wanted)]
    # Give every step groups from the beginning and from the end of the run.
    return [chosen[step::num_steps] for step in range(num_steps)]


def items_of(groups: Sequence[Group]) -> list[TrainItem]:
    """Return all trainable trajectories."""
    rows = [(g, t) for g, group in enumerate(groups) for t in group.trajectories if t.is_trainable]
    ones = [np.ones(t.num_response_tokens, np.float32) for _, t in rows]
    return [TrainItem(row=i, group=g, trajectory=t, advantages=ones[i]) for i, (g, t) in enumerate(rows)]


def token_counts(groups: Sequence[Group], config: Config) -> dict[str, float]:
    """Return the number of tokens that each layout computes. The numbers are exact: nothing is timed."""
    items, budget = items_of(groups), config.learner.token_budget
    counts = {
        name: sum(batch.packing.num_tokens for batch in split(items, max_tokens=budget, share_prefixes=share))
        for name, share in (("shared", True), ("packed", False))
    }
    inputs = sum(item.num_inputs for item in items)
    padded = len(items) * max(item.num_inputs for item in items)
    # Put all items into one micro-batch, which has the tokens to compute if no group is split.
    whole = sum(batch.packing.num_tokens for batch in split(items, max_tokens=max(budget, inputs), share_prefixes=True))
    return {
        "tokens": float(inputs),
        "computed_shared": float(counts["shared"]),
        "computed_padded": float(padded),
        "saved_by_sharing": 1 - counts["shared"] / inputs,
        "packing_efficiency": inputs / counts["packed"],
        "sharing_efficiency": whole / counts["shared"],
        "padded_efficiency": inputs / padded,
    }


def tokens_by_task(run: Path, config: Config) -> dict[str, dict[str, float]]:
    """Return task -> token counts over all recorded steps."""
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


def layout_of_run(run: Path, config: Config) -> dict[str, float]:
    """Return the sums of `token_counts` over all recorded steps, and shares computed from these sums."""
    sums: dict[str, float] = {}
    for file in sorted((run / "trajectories").glob("step=*.parquet")):
        groups = [group for group in read_groups(file) if any(t.is_trainable for t in group.trajectories)]
        counts = token_counts(groups, config)
        whole = counts["computed_shared"] * counts["sharing_efficiency"]
        packed = counts["tokens"] / counts["packing_efficiency"]
        parts = {name: counts[name] for name in ("tokens", "computed_shared", "computed_padded")}
        for name, value in (parts | {"packed": packed, "whole": whole}).items():
            sums[name] = sums.get(name, 0.0) + value
    return {
        "tokens": sums["tokens"],
        "saved_by_sharing": 1 - sums["computed_shared"] / sums["tokens"],
        "packing_efficiency": sums["tokens"] / sums["packed"],
        "sharing_efficiency": sums["whole"] / sums["computed_shared"],
        "padded_efficiency": sums["tokens"] / sums["computed_padded"],
    }


def flops(config: Config, groups: Sequence[Group]) -> float:
    """Return the number of operations in the matrix products of rayapp's step: 6 per weight and token, without
    attention. The output embedding counts only at response tokens.
    """
    from rayapp.learner.memory.shape import model_shape

    if not groups:
        return 0.0
    shape = model_shape(config)
    batches = split(items_of(groups), max_tokens=config.learner.token_budget, share_prefixes=True)
    layers = shape.num_layers * shape.num_layer_parameters * sum(b.packing.num_tokens for b in batches)
    head = shape.vocabulary * shape.hidden * sum(b.head_positions.size for b in batches)
    return 6.0 * (layers + head)


class Rank:
    """The two compared learners on one rank, and the steps on which they train.

    Args:
        rank, world, port: rank, world size and port of the process group that both learners use.
    """

    def __init__(self, config: Config, steps: Sequence[Sequence[Group]], rank: int, world: int, port: int) -> None:
        from padded_learner import PaddedLearner

        from actors.learner import Learner
        from rayapp.learner.shares import deal

        self.config, self.steps, self.rank = config, steps, rank
        self.ours, self.padded = Learner(config, rank, world, "127.0.0.1", port), PaddedLearner(config)
        self.summaries = [tuple(summarize_group(g, time_total_s=0.0) for g in groups) for groups in steps]
        self.shares = [deal(some, config, world) for some in self.summaries]

    def mine(self, step: int) -> list[Group]:
        """Return the groups that have trajectories on this rank."""
        return [self.steps[step][share.position] for share in self.shares[step][self.rank]]

    def cut(self, step: int) -> list[Group]:
        """Return the groups of `mine`, reduced to this rank's trajectories."""
        return [
            replace(group, trajectories=group.trajectories[share.start : share.stop])
            for share, group in zip(self.shares[step][self.rank], self.mine(step), strict=True)
        ]

    def run(self, name: str, num_steps: int) -> float:
        """Run the first `num_steps` steps. Return the seconds from the common start until all ranks are done."""
        import torch.distributed as dist

        dist.barrier()
        started = time.perf_counter()
        for step, groups in enumerate(self.steps[:num_steps]):
            if name == "ours":
                self.ours.train_step(step + 1, self.summaries[step], self.shares[step], *self.mine(step))
            else:
                responses = sum(t.num_response_tokens for group in groups for t in group.trajectories)
                self.padded.step(self.cut(step), responses)
        dist.barrier()
        return time.perf_counter() - started

    def flops(self) -> float:
        return sum(flops(self.config, self.cut(step)) for step in range(len(self.steps)))


def run_rank(arguments: argparse.Namespace, rank: int, port: int, results: Any) -> None:
    """Run one rank's process, in which the learners alternate in rounds. Put its measurements into `results`."""
    import torch.distributed as dist

    config = load_config(arguments.config, arguments.overrides)
    config = config.model_copy(update={"learner": config.learner.model_copy(update={"num_learners": arguments.ranks})})
    both = Rank(config, recorded_steps(arguments.run, arguments.steps, arguments.groups), rank, arguments.ranks, port)
    seconds: dict[str, list[float]] = {"ours": [], "padded": []}
    for number in range(arguments.rounds + 1):
        for name, measured in seconds.items():
            elapsed = both.run(name, num_steps=arguments.steps if number else 1)
            if number:  # the first round warms up, on one step
                measured.append(elapsed)
    dist.barrier()  # measure limits with the cores of all ranks busy
    results.put(
        {
            "rank": rank,
            "seconds": seconds,
            "flops": both.flops(),
            "limits": machine.measure_limits(),
            "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
    )
    both.ours.close()


def compare(arguments: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    """Run all ranks, and merge their numbers. If a rank fails, the benchmark ends."""
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    port = free_port()
    ranks = [context.Process(target=run_rank, args=(arguments, r, port, results)) for r in range(arguments.ranks)]
    for process in ranks:
        process.start()
    found: list[dict[str, Any]] = []
    while len(found) < len(ranks):
        try:
            found.append(results.get(timeout=1.0))
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in ranks):
                for process in ranks:
                    process.kill()
                raise SystemExit("a rank failed; see above") from None
    for process in ranks:
        process.join()
    return summarize(sorted(found, key=lambda each: each["rank"]), num_tokens)


def summarize(ranks: Sequence[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Merge the ranks' results. Times are those of rank 0, because ranks start and end together; operations and limits
    are sums over all ranks.
    """
    seconds = ranks[0]["seconds"]
    median = {name: statistics.median(values) for name, values in seconds.items()}
    peak = sum(each["limits"]["gemm_bfloat16_gflops"] for each in ranks)
    achieved = sum(each["flops"] for each in ranks) / median["ours"] / 1e9
    return {
        "ranks": len(ranks),
        "seconds": seconds,
        "tokens": num_tokens,
        "tokens_per_s": {name: num_tokens / value for name, value in median.items()},
        "ratio": median["padded"] / median["ours"],
        "gflops": achieved,
        "gemm_peak_gflops": peak,
        "share_of_gemm_peak": achieved / peak,
        "limits_by_rank": [each["limits"] for each in ranks],
        "peak_rss_gib": [each["peak_rss_gib"] for each in ranks],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--config", type=Path, default=Path("configs/coding_cpu.yaml"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.config, arguments.overrides)
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
    result: dict[str, Any] = {"settings": settings, "machine": machine.describe()}
    if arguments.tokens_only:
        result |= {
            "tokens_by_task": tokens_by_task(arguments.run, config),
            "layout_of_run": layout_of_run(arguments.run, config),
        }
    if not arguments.tokens_only:
        groups = [g for s in recorded_steps(arguments.run, arguments.steps, arguments.groups) for g in s]
        result |= {"layout": token_counts(groups, config)}
        result |= compare(arguments, sum(int(t.num_tokens) for g in groups for t in g.trajectories))
        efficiencies = {name: result["layout"][name] for name in ("packing_efficiency", "sharing_efficiency")}
        result["ratios"] = {"tokens_per_s_of_padded": result["ratio"], **efficiencies}
    json.dump(result, sys.stdout, indent=None if arguments.json else 2)
    print()


if __name__ == "__main__":
    main()
