"""Plots the share of completions that pass every test, for several runs in one picture, with warm-up and evaluations,
and prints the table of docs/results.md: `python benchmarks/plot_runs.py OUT.png RUN_FOLDER...`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rayapp.runs.tracking.metrics import read_metrics

SOLVED, HELD_OUT, NO_SIGNAL = "reward/solved/mean", "eval/reward/solved/mean", "groups/zero_variance"


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run's warm-up and of the run. The last step of the warm-up becomes step 0."""
    warmup = read_metrics(run.with_name(f"{run.name}-sft") / "metrics.jsonl")
    last = max((record["step"] for record in warmup), default=0)
    return [record | {"step": record["step"] - last} for record in warmup] + read_metrics(run / "metrics.jsonl")


def mean(records: list[dict[str, Any]], key: str) -> float:
    return sum(record[key] for record in records) / len(records)


def row(run: Path) -> str:
    records = steps_of(run)
    trained = [record for record in records if SOLVED in record]
    first, last = mean(trained[:3], SOLVED), mean(trained[-5:], SOLVED)
    held_out = " / ".join(f"{record[HELD_OUT]:.2f}" for record in records if HELD_OUT in record)
    entropy = [record["learner/entropy"] for record in trained if "learner/entropy" in record]
    silent = next((record["step"] for record in trained if record[NO_SIGNAL] > 0), None)
    return (
        f"| {run.name} | {first:.2f} | {last:.2f} | {last - first:+.2f} | "
        f"{held_out} | {entropy[0]:.2f} to {entropy[-1]:.2f} | {silent} |"
    )


def main(out: Path, runs: list[Path]) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        records = steps_of(run)
        for key, style in ((SOLVED, "-"), (HELD_OUT, "D")):
            points = [(record["step"], record[key]) for record in records if key in record]
            label = run.name if key == SOLVED else "evaluated, asked in other words" if run == runs[-1] else None
            axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    axes.axvspan(min(record["step"] for run in runs for record in steps_of(run)), 0, color="0.93", zorder=0)
    axes.text(-8, 0.5, "warm-up on\ndemonstrations", ha="center", va="center")
    axes.set(xlabel="step", ylabel="share of completions that pass every test", ylim=(-0.03, 1.03))
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(out, dpi=110)
    print("| run | solved, steps 1-3 | last 5 | rise | evaluated: before, warm, end | entropy | first equal group |")
    print("|---|---|---|---|---|---|---|", *map(row, runs), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
