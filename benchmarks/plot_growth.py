"""Plots processor time and peak memory over the size of trajectories, from reports of benchmarks.growth. Reports over
the same axis share a column; forked trajectories are dashed. A part's memory is the process's peak until its end.

    python benchmarks/plot_growth.py OUT.png benchmarks/records/growth/*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

PARTS = {
    "record": "recorder", "micro-batches": "learner's micro-batches", "write": "trajectory file: write",
    "read": "trajectory file: read",
}  # fmt: skip
AXES = {"turns": "turns of 320 tokens", "trajectories": "trajectories of 100 turns"}


def axis_of(report: dict[str, Any]) -> str:
    return "turns" if report["settings"]["lengths"] else "trajectories"


def main(out: Path, files: list[Path]) -> None:
    reports = [json.loads(file.read_text()) for file in files]
    columns = [axis for axis in AXES if axis in map(axis_of, reports)]
    figure = Figure(figsize=(4.2 * len(columns), 5), layout="constrained")
    panels = figure.subplots(2, len(columns), sharex="col", squeeze=False)
    for report in reports:
        time, memory = panels[:, columns.index(axis_of(report))]
        style = "--" if report["settings"]["forked"] else "-"
        sizes = [int(size) for size in report["sizes"]]
        for number, (part, label) in enumerate(PARTS.items()):
            for panel, key in ((time, "s_per_million_tokens"), (memory, "peak_mib")):
                values = [one[key][part] for one in report["sizes"].values()]
                panel.plot(sizes, values, style, color=f"C{number}", marker=".", label=label if style == "-" else None)
        memory.set(xlabel=AXES[axis_of(report)])
    panels[0, 0].set(ylabel="processor seconds\nper million tokens")
    panels[1, 0].set(ylabel="peak memory, MiB")
    for panel in panels.flat:
        panel.set(xlim=(0, None), ylim=(0, None))
    panels[0, 0].legend(frameon=False, loc="upper left")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
