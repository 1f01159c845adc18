"""Mean reward per step of several runs in one picture: `python benchmarks/plot_runs.py OUT.png RUN_FOLDER...`"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def rewards(run: Path) -> list[float]:
    return [json.loads(line)["reward/mean"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def main(out: Path, runs: list[Path]) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        values = rewards(run)
        first, last = sum(values[:5]) / 5, sum(values[-5:]) / 5
        axes.plot(range(1, len(values) + 1), values, label=f"{run.name}: {first:+.2f} to {last:+.2f}")
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set(xlabel="step", ylabel="mean reward of 32 completions")
    axes.legend(title="mean of the first and last 5 steps", frameon=False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
