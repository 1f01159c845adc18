"""PNG plots of a run: `rewards.png`, and one for each panel of the report.

Drawn with matplotlib, without a display.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayapp.core.files import aside
from rayapp.runs.tracking.metrics import read_metrics
from rayapp.runs.view.curves import Curves, Panel

SMOOTHED_STEPS = 5
COLOURS = ("#1f5fbf", "#c2500a", "#1b7a46", "#8a3ab0", "#b0186e", "#7a6200", "#0a7683", "#66513d")
# Typed as Any, because matplotlib's stubs require a literal type for each key.
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
    """Draw `rewards.png` beside `metrics.jsonl`; do nothing if no step was logged.
    The steps of a warm-up, whose folder is beside the run's, come first, with numbers up to 0. A supervised run gets a
    plot of its losses.
    """
    records = read_metrics(run_path / "metrics.jsonl")
    if not records:
        return
    layout = {"nrows": 2, "figsize": (9, 7), "sharex": True, "height_ratios": (3, 2)}
    with _picture(run_path / "rewards.png", layout) as (top, bottom):
        if any("sft/loss" in record for record in records):
            _draw_lines(top, records, _LOSSES, "nats per token")
            _draw_lines(bottom, records, {"sft/entropy": "entropy of the policy"}, "nats")
        else:
            warmup = _before_step_one(read_metrics(run_path.with_name(f"{run_path.name}-sft") / "metrics.jsonl"))
            _draw_rewards(top, records)
            _draw_shares(bottom, [*warmup, *records])
            _draw_nats(bottom.twinx(), [*warmup, *records])
            if warmup:
                _mark_warmup((top, bottom), first=min(record["step"] for record in warmup))
        bottom.set_xlabel("optimizer step")
        top.set_title(f"{run_path.name}: {max(record['step'] for record in records)} steps")


def _before_step_one(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Renumber the records of a warm-up, so that its last step becomes step 0."""
    last = max((record["step"] for record in records), default=0)
    return [record | {"step": record["step"] - last} for record in records]


def _mark_warmup(all_axes: Sequence[Any], *, first: int) -> None:
    for axes in all_axes:
        axes.axvspan(first, 0, color="0.93", zorder=0)
    all_axes[0].text(first / 2, 0.97, "warm-up", transform=all_axes[0].get_xaxis_transform(), ha="center", va="top")


def draw_panels(panels: Iterable[tuple[Panel, Curves]], folder: Path) -> dict[str, Path]:
    """Write `<title>.png` for each panel.

    Returns:
        The files by title, in the panels' order.
    """
    return {panel.title: _draw_panel(panel, curves, folder) for panel, curves in panels}


@contextmanager
def _picture(path: Path, layout: dict[str, Any], style: Any = None) -> Iterator[Any]:
    """Yield axes to draw on; they are saved to `path` at the end of the block.

    Args:
        layout: arguments of `pyplot.subplots`.
        style: matplotlib settings for this picture; None for the defaults.
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


def _draw_panel(panel: Panel, curves: Curves, folder: Path) -> Path:
    path = folder / f"{re.sub(r'[^a-z0-9]+', '-', panel.title.lower()).strip('-')}.png"
    with _picture(path, {"figsize": (6.4, 3.2)}, _STYLE) as axes:
        for number, (key, curve) in enumerate(curves.items()):
            is_point = len(curve["steps"]) == 1
            marker, label = ("o", f"{key}: {curve['values'][0]:.3g}") if is_point else (None, key)
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(curve["steps"], curve["values"], color=colour, linewidth=1.6, marker=marker, label=label)
        _dress(axes, panel)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A metric of several runs: the mean at each step, and a band around it."""

    label: str
    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def draw_lines(panel: Panel, key: str, lines: Iterable[Line], path: Path) -> None:
    """Draw the lines of one metric, in the panel's unit and range, to `path`."""
    with _picture(path, {"figsize": (6.4, 3.2)}, _STYLE) as axes:
        for number, line in enumerate(lines):
            colour, is_point = COLOURS[number % len(COLOURS)], len(line.steps) == 1
            axes.plot(
                line.steps, line.mean, color=colour, linewidth=1.6, marker="o" if is_point else None, label=line.label
            )
            axes.fill_between(line.steps, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        _dress(axes, replace(panel, title=f"{panel.title}: {key}"))


def _dress(axes: Any, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontweight="bold", fontsize=10)
    axes.set_xlabel("optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if panel.unit:
        axes.set_ylabel(panel.unit)
    if panel.floor is not None and panel.ceiling is not None:
        margin = (panel.ceiling - panel.floor) * 0.03
        axes.set_ylim(panel.floor - margin, panel.ceiling + margin)
    # The legend would omit keys that begin with an underscore; ours never do.
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


_SHARES = {
    "reward/pass_rate/mean": "tests passed",
    "reward/solved/mean": "completions that pass every test",
    "groups/zero_variance": "groups with equal rewards",
}
_LOSSES = {"sft/loss": "loss of the demonstrations", "sft/validation_loss": "loss of the rows held out"}
_HELD_OUT = "eval/reward/solved/mean"


def _draw_shares(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    _draw_lines(axes, records, _SHARES, "share", first_colour=3)
    steps, values = _series(records, _HELD_OUT)
    if steps:
        axes.plot(steps, values, "D", color="C4", markeredgecolor="black", label="the same, evaluated", zorder=3)
        axes.legend(loc="upper left", fontsize=8)
    axes.set_ylim(-0.02, 1.02)


def _draw_nats(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    """Draw entropy, and the losses of a warm-up, on an axis at the right."""
    _draw_lines(axes, records, {"learner/entropy": "entropy", **_LOSSES}, "nats per token", first_colour=7)
    axes.set_ylim(bottom=0)
    axes.grid(visible=False)
    if axes.get_legend() is not None:
        axes.legend(loc="center right", fontsize=8)


def _draw_lines(
    axes: Any, records: Sequence[dict[str, Any]], shown: dict[str, str], unit: str, *, first_colour: int = 0
) -> None:
    for number, (key, label) in enumerate(shown.items(), start=first_colour):
        steps, values = _series(records, key)
        if steps:
            axes.plot(steps, _smoothed(values), color=f"C{number}", label=label)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", fontsize=8)


def _tasks(records: Sequence[dict[str, Any]]) -> list[str]:
    keys = {key for record in records for key in record if key.startswith("task/") and key.endswith("/reward/mean")}
    return sorted(key.removeprefix("task/").removesuffix("/reward/mean") for key in keys)


def _series(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return the steps that have this metric, and its values."""
    found = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in found], [value for _, value in found]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and up to four before it."""
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
