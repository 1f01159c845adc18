"""Plots the KL to the teacher and the share of solved completions of each step:
`python benchmarks/plot_distillation.py OUT.png RUN`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure

from rayapp.runs.tracking.metrics import read_metrics

CURVES = {"distillation/kl": "KL to the teacher, nats per token", "reward/solved/mean": "share that passes every test"}


def main(out: Path, run: Path) -> None:
    records = [record for record in read_metrics(run / "metrics.jsonl") if "distillation/kl" in record]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (key, label) in zip(figure.subplots(1, 2), CURVES.items(), strict=True):
        axes.plot([record["step"] for record in records], [record[key] for record in records], marker=".")
        axes.set(xlabel="step", ylabel=label, ylim=(0, None))
        print(key, " ".join(f"{record[key]:.2f}" for record in records))
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
