"""PNG plots of a run: `rewards.png` for people who would rather look, and one for each panel of the report.

Drawn with matplotlib, without a display.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayapp.core.files import aside
from rayapp.runs.tracking.jsonl import read_metrics
from rayapp.runs.view.panels import Panel

SMOOTHED_STEPS = 5
COLOURS = ("#1f5fbf", "#c2500a", "#1b7a46", "#8a3ab0", "#b0186e", "#7a6200", "#0a7683", "#66513d")
# Any: the stubs of matplotlib want a literal type of every key it has.
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8a82",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e2e2dc",
    "legend.frameon": False,
}


def write_reward_plot(run_path: Path) -> None:
    """Draw `rewards.png` beside `metrics.jsonl`, or nothing where no step was logged."""
    records = read_metrics(run_path / "metrics.jsonl")
    if not records:
        return
    layout = {"nrows": 2, "figsize": (9, 7), "sharex": True, "height_ratios": (3, 2)}
    with _picture(run_path / "rewards.png", layout) as (top, bottom):
        _draw_rewards(top, records)
        _draw_shares(bottom, records)
        top.set_title(f"{run_path.name}: {len(records)} steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """A panel with its data: metric -> {"steps": [...], "values": [...]}."""

    panel: Panel
    curves: dict[str, dict[str, list[float]]]


def draw_panels(panels: list[Curves], folder: Path) -> dict[str, Path]:
    """Write `<title>.png` for each panel.

    Returns:
        The files by title, in the panels' order.
    """
    return {one.panel.title: _draw_panel(one, folder) for one in panels}


@contextmanager
def _picture(path: Path, layout: dict[str, Any], style: Any = None) -> Iterator[Any]:
    """Axes to draw on; what is drawn becomes the file at `path` when the block ends.

    Args:
        layout: arguments of `pyplot.subplots`.
        style: settings of matplotlib for this picture; None is its own.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(**layout)
        try:
            yield axes
            figure.tight_layout()
            with aside(path) as temporary:
                figure.savefig(temporary, dpi=120)
        finally:
            pyplot.close(figure)


def _draw_panel(one: Curves, folder: Path) -> Path:
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', one.panel.title.lower()).strip('-')}.png"
    with _picture(path, {"figsize": (6.4, 3.2)}, _STYLE) as axes:
        for number, (key, curve) in enumerate(one.curves.items()):
            marker = "o" if len(curve["steps"]) == 1 else None
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(curve["steps"], curve["values"], color=colour, linewidth=1.6, marker=marker, label=key)
        _dress(axes, one.panel)
    return path


def _dress(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontweight="bold", fontsize=10)
    axes.set_xlabel("optimizer step")
    if panel.unit:
        axes.set_ylabel(panel.unit)
    if panel.floor is not None and panel.ceiling is not None:
        margin = (panel.ceiling - panel.floor) * 0.03
        axes.set_ylim(panel.floor - margin, panel.ceiling + margin)
    # Keys that begin with an underscore would be left out of the legend; ours never do.
    axes.legend(fontsize=7, ncols=2, loc="best")


def _draw_rewards(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    steps, means = _series(records, "reward/mean")
    spread = dict(zip(*_series(records, "reward/std"), strict=True))
    low = [mean - spread.get(step, 0.0) for step, mean in zip(steps, means, strict=True)]
    high = [mean + spread.get(step, 0.0) for step, mean in zip(steps, means, strict=True)]
    axes.fill_between(steps, low, high, alpha=0.15, color="C0", label="± one standard deviation")
    axes.plot(steps, means, alpha=0.4, color="C0")
    axes.plot(steps, _smoothed(means), color="C0", linewidth=2.5, label=f"all tasks, mean of {SMOOTHED_STEPS} steps")
    for number, task in enumerate(_tasks(records), start=1):
        own_steps, own = _series(records, f"task/{task}/reward/mean")
        axes.plot(own_steps, _smoothed(own), color=f"C{number}", linewidth=1.2, label=task)
    axes.set_ylabel("reward (−1: error, 1: all tests pass)")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)


def _draw_shares(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    shown = {
        "reward/pass_rate/mean": "tests passed",
        "reward/solved/mean": "completions that pass every test",
        "groups/zero_variance": "groups with equal rewards",
    }
    for number, (key, label) in enumerate(shown.items(), start=3):
        steps, values = _series(records, key)
        axes.plot(steps, _smoothed(values), color=f"C{number}", label=label)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("share")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)


def _tasks(records: Sequence[dict[str, Any]]) -> list[str]:
    keys = {key for record in records for key in record if key.startswith("task/") and key.endswith("/reward/mean")}
    return sorted(key.removeprefix("task/").removesuffix("/reward/mean") for key in keys)


def _series(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps that have this metric, and its values."""
    found = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in found], [value for _, value in found]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each value and those before it, up to five."""
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
