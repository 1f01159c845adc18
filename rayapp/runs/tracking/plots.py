"""`rewards.png`: what the policy learned, for people who would rather look. Drawn from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rayapp.runs.tracking.jsonl import read_metrics

SMOOTHED_STEPS = 5


def write_reward_plot(run_path: Path) -> None:
    """Draw `rewards.png` beside `metrics.jsonl`, or nothing where no step was logged."""
    file = run_path / "metrics.jsonl"
    records = list(read_metrics(file)) if file.exists() else []
    if not records:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2))
    _draw_rewards(top, records)
    _draw_shares(bottom, records)
    top.set_title(f"{run_path.name}: {len(records)} steps")
    figure.tight_layout()
    pending = run_path / ".rewards.pending.png"
    figure.savefig(pending, dpi=120)
    pyplot.close(figure)
    pending.replace(run_path / "rewards.png")


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
