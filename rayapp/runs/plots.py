"""The plot of a run: `rewards.png`, drawn with matplotlib, without a display."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayapp.core.files import aside
from rayapp.runs.tracking.metrics import read_metrics

SMOOTHED_STEPS = 5


def write_reward_plot(run_path: Path) -> None:
    """Draw `rewards.png` beside `metrics.jsonl`, if a step was logged. The steps of a warm-up, whose folder is beside
    the run's, have numbers up to 0; a supervised run gets its losses."""
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
    last = max((record["step"] for record in records), default=0)
    return [record | {"step": record["step"] - last} for record in records]


def _mark_warmup(all_axes: Sequence[Any], *, first: int) -> None:
    for axes in all_axes:
        axes.axvspan(first, 0, color="0.93", zorder=0)
    all_axes[0].text(first / 2, 0.97, "warm-up", transform=all_axes[0].get_xaxis_transform(), ha="center", va="top")


@contextmanager
def _picture(path: Path, layout: dict[str, Any]) -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**layout)
    try:
        yield axes
        figure.tight_layout()
        with aside(path) as temporary:
            figure.savefig(temporary, dpi=120)
    finally:
        pyplot.close(figure)


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
    axes.legend(loc="best", fontsize=8)


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
        axes.legend(loc="best", fontsize=8)
    axes.set_ylim(-0.02, 1.02)


def _draw_nats(axes: Any, records: Sequence[dict[str, Any]]) -> None:
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
        axes.legend(loc="best", fontsize=8)


def _tasks(records: Sequence[dict[str, Any]]) -> list[str]:
    keys = {key for record in records for key in record if key.startswith("task/") and key.endswith("/reward/mean")}
    return sorted(key.removeprefix("task/").removesuffix("/reward/mean") for key in keys)


def _series(records: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(record["step"], record[key]) for record in records if key in record]
    return [step for step, _ in found], [value for _, value in found]


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and up to four before it."""
    windows = (values[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]
