"""What a person sees while a run goes on: a live display on a terminal, one line a step anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARK = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 40


class LineConsole:
    """One plain line a step: for pipes, files and `ray job logs`, which would mangle a live display."""

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        self._num_steps = num_steps
        self._stream = stream or sys.stdout

    def started(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def phase(self, name: str) -> None:
        """Phases change too often for a log."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(step_line(step, self._num_steps, metrics), file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is held."""


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """The numbers a person reads, in one line; a dash where a step has none."""
    shown = (
        ("reward", "reward/mean", "{:+.3f}"),
        ("pass", "reward/pass_rate/mean", "{:.2f}"),
        ("solved", "reward/solved/mean", "{:.2f}"),
        ("entropy", "learner/entropy", "{:.2f}"),
        ("stale", "staleness/max", "{:.0f}"),
        ("tok/s", "throughput/response_tokens_per_s", "{:.0f}"),
        ("s", "timing_s/step", "{:.1f}"),
    )
    parts = (f"{label} {form.format(metrics[key]) if key in metrics else '-'}" for label, key, form in shown)
    return f"step {step}/{num_steps}  " + "  ".join(parts)


class LiveConsole:
    """A display that is redrawn in place.

    Args:
        num_steps: of the whole run.
        name: of the run.
    """

    def __init__(self, num_steps: int, name: str, console: Console | None = None) -> None:
        self._num_steps = num_steps
        self._name = name
        self._step = 0
        self._phase = "starting"
        self._note = ""
        self._metrics: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._seconds: list[float] = []
        self._phase_started = time.monotonic()
        self._live = Live(get_renderable=self._render, console=console or Console(stderr=True), refresh_per_second=4)
        self._live.start()

    def started(self, text: str) -> None:
        self._note = text

    def phase(self, name: str) -> None:
        self._phase, self._phase_started = name, time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._metrics = step, metrics
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        self._seconds = [*self._seconds[-19:], metrics.get("timing_s/step", 0.0)]

    def close(self) -> None:
        self._phase = "done" if self._step >= self._num_steps else "stopped"
        self._live.stop()

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(self._name, style="bold"), self._progress(), Text(self._phase_text(), style="cyan"))
        table.add_row(Text("reward", style="dim"), Text(sparkline(self._rewards)), Text(self._number("reward/mean", "{:+.3f}")))
        return Group(table, Text(self._details(), style="dim"), Text(self._note, style="dim"))

    def _progress(self) -> ProgressBar:
        return ProgressBar(total=self._num_steps, completed=self._step, width=SPARK_STEPS)

    def _phase_text(self) -> str:
        return f"step {self._step}/{self._num_steps}  {self._phase} {time.monotonic() - self._phase_started:.0f} s"

    def _details(self) -> str:
        left = (self._num_steps - self._step) * (sum(self._seconds) / len(self._seconds) if self._seconds else 0.0)
        eta = f"{left // 60:.0f} min {left % 60:.0f} s" if self._seconds else "-"
        return (
            f"pass rate {self._number('reward/pass_rate/mean', '{:.2f}')}   solved {self._number('reward/solved/mean', '{:.2f}')}"
            f"   entropy {self._number('learner/entropy', '{:.2f}')}   no signal {self._number('groups/zero_variance', '{:.0%}')}"
            f"   {self._number('throughput/response_tokens_per_s', '{:.0f}')} tokens/s"
            f"   {self._number('timing_s/step', '{:.1f}')} s a step   left {eta}"
        )

    def _number(self, key: str, form: str) -> str:
        return form.format(self._metrics[key]) if key in self._metrics else "-"


def sparkline(values: list[float], width: int = SPARK_STEPS) -> str:
    """The last `width` values as bars between their own extremes; empty for none."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARK[round((value - low) * scale)] for value in shown)
