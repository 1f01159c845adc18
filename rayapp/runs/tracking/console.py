"""Shows a run's progress: a live display on a terminal, otherwise one line or log record per step.

All consoles show the same numbers, and a dash for a missing one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARK = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 40
PACE_STEPS = 20
NUM_NOTES = 4
FIRST_SILENCE_S, LONGEST_SILENCE_S = 10.0, 160.0
# Label -> metric and format.
FORMATS: dict[str, tuple[str, str]] = {
    "reward": ("reward/mean", "{:+.3f}"),
    "pass rate": ("reward/pass_rate/mean", "{:.2f}"),
    "solved": ("reward/solved/mean", "{:.2f}"),
    "no signal": ("groups/zero_variance", "{:.0%}"),
    "entropy": ("learner/entropy", "{:.2f}"),
    "stale": ("staleness/max", "{:.0f}"),
    "tokens/s": ("throughput/response_tokens_per_s", "{:.0f}"),
    "seconds": ("timing_s/step", "{:.1f}"),
}
# Numbers of a step on demonstrations.
SUPERVISED: dict[str, tuple[str, str]] = {
    "loss": ("sft/loss", "{:.3f}"),
    "validation": ("sft/validation_loss", "{:.3f}"),
    "entropy": ("sft/entropy", "{:.2f}"),
    "epoch": ("sft/epoch", "{:.2f}"),
    "tokens": ("sft/num_tokens", "{:.0f}"),
    "seconds": ("timing_s/step", "{:.1f}"),
}
# Numbers of steps that have them: on GPUs, with prices (`budget`), of evaluations.
OPTIONAL: dict[str, tuple[str, str]] = {
    "tokens/s/GPU": ("throughput/tokens_per_s_per_gpu", "{:.0f}"),
    "cost": ("cost/total", "{:.2f}"),
    "eval scored": ("eval/trajectories/scored", "{:.0f}"),
    "eval failed": ("eval/trajectories/failed", "{:.0f}"),
    "eval prompts left out": ("eval/prompts/left_out", "{:.0f}"),
}
# Numbers of an evaluation, after those of a step, or alone before the first step.
EVALUATED: dict[str, tuple[str, str]] = {
    "eval reward": ("eval/reward/mean", "{:+.3f}"),
    "eval solved": ("eval/reward/solved/mean", "{:.2f}"),
}
# Meanings of the labels in FORMATS, shown once, before the first step.
LEGEND = (
    "reward: mean over the step's completions; pass rate: share of tests passed; solved: share of completions that "
    "pass all; no signal: share of groups with equal rewards, from which GRPO learns nothing; entropy: nats per token, "
    "near 0 the policy repeats itself; stale: optimizer steps between the weights that sampled and those that train; "
    "tokens/s: sampled tokens per second of the step; tokens/s/GPU: trained tokens per second and GPU of the run"
)
# Meanings of the labels in SUPERVISED.
SUPERVISED_LEGEND = (
    "loss, validation: cross-entropy of the step's demonstrations and of held-out rows, in nats per token; epoch: "
    "passes over the demonstrations so far; tokens: tokens learned in this step"
)


def formats_of(metrics: Mapping[str, float]) -> dict[str, tuple[str, str]]:
    evaluated = EVALUATED if any(key.startswith("eval/") for key in metrics) else {}
    if any(key.startswith("sft/") for key in metrics):
        return SUPERVISED | evaluated
    optional = {label: form for label, form in OPTIONAL.items() if form[0] in metrics}
    return (evaluated if evaluated and "reward/mean" not in metrics else FORMATS | evaluated) | optional


def legend_of(metrics: Mapping[str, float]) -> str:
    """Return the meanings of the labels that a step with these metrics shows; empty for an evaluation alone."""
    if any(key.startswith("sft/") for key in metrics):
        return SUPERVISED_LEGEND
    return LEGEND if "reward/mean" in metrics else ""


class Pace:
    """Estimates a run's remaining time from the mean duration of its last steps."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._seconds: deque[float] = deque(maxlen=PACE_STEPS)

    def seconds_left(self, step: int, metrics: Mapping[str, float]) -> float | None:
        """Count this step and return the seconds left after it; None until a step has reported its duration."""
        if "timing_s/step" in metrics:
            self._seconds.append(metrics["timing_s/step"])
        if not self._seconds:
            return None
        return (self._num_steps - step) * sum(self._seconds) / len(self._seconds)


def duration(seconds: float | None) -> str:
    """Format seconds: `48 s`, `12 min`, `3 h 05 min`; a dash for None."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def number(label: str, metrics: Mapping[str, float]) -> str:
    key, form = formats_of(metrics)[label]
    return form.format(metrics[key]) if key in metrics else "-"


class LineConsole:
    """Prints one plain line per step, for pipes, files and `ray job logs`, which would garble a live display. `write`
    writes a line, in place of a stream.
    """

    def __init__(
        self, num_steps: int, stream: TextIO | None = None, *, write: Callable[[str], object] | None = None
    ) -> None:
        self._num_steps = num_steps
        self._write = write or partial(print, file=stream or sys.stdout, flush=True)
        self._pace = Pace(num_steps)
        self._is_explained = False
        self._step = 0
        self._phase, self._phase_started, self._progress = "starting", time.monotonic(), ""
        self._is_closed = threading.Event()
        self._silent_s, self._last_line = FIRST_SILENCE_S, time.monotonic()

    def note(self, text: str) -> None:
        self._print(text)
        self._silent_s = FIRST_SILENCE_S

    def _print(self, text: str) -> None:
        self._write(text)
        self._last_line = time.monotonic()

    def phase(self, name: str) -> None:
        if self._phase == "starting" and not self._is_closed.is_set():
            threading.Thread(target=self._break_silence, name="console", daemon=True).start()
        self._phase, self._phase_started, self._progress = name, time.monotonic(), ""

    def progress(self, text: str) -> None:
        self._progress = text

    def _break_silence(self) -> None:
        """Say what the run waits for after 10 s without a line, then after 20, 40, … s."""
        while not self._is_closed.wait(1.0):
            now = time.monotonic()
            if now - self._last_line >= self._silent_s:
                self._silent_s = min(2 * self._silent_s, LONGEST_SILENCE_S)
                done = f", {self._progress}" if self._progress else ""
                self._print(f"step {self._step + 1}: {self._phase} {duration(now - self._phase_started)}{done}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step = step
        self._explain(metrics)
        self.note(self._line(step, metrics))

    def _explain(self, metrics: Mapping[str, float]) -> None:
        if not self._is_explained and (legend := legend_of(metrics)):
            self._is_explained = True
            self.note(legend)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        return step_line(step, self._num_steps, metrics, seconds_left=self._pace.seconds_left(step, metrics))

    def close(self) -> None:
        self._is_closed.set()


def step_line(step: int, num_steps: int, metrics: Mapping[str, float], *, seconds_left: float | None) -> str:
    """Format the shown numbers of a step, in columns that line up from step to step."""
    width = len(str(num_steps))
    shown = (f"{label} {number(label, metrics):>{_width(label)}}" for label in formats_of(metrics))
    return f"step {step:>{width}}/{num_steps}  {'  '.join(shown)}  left {duration(seconds_left)}"


def _width(label: str) -> int:
    return len({"reward": "+0.000", "no signal": "100%", "stale": "0", "tokens/s": "0000"}.get(label, "0.00"))


class LiveConsole:
    """A display that is redrawn in place, with `is_live` also periodically. `console` is the place to draw; default:
    the terminal behind standard error."""

    def __init__(
        self,
        num_steps: int,
        name: str,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_live: bool = True,
    ) -> None:
        self._num_steps = num_steps
        self._name = name
        self._clock = clock
        self._step = 0
        self._metrics: Mapping[str, float] = {}
        self._rewards: list[float] = []
        self._notes: tuple[str, ...] = ()  # replaced, never changed: rich's thread reads them while it redraws
        self._pace = Pace(num_steps)
        self._seconds_left: float | None = None
        self._started = clock()
        self._phase, self._phase_started, self._progress = "starting", self._started, ""
        self._live = Live(get_renderable=self._render, console=console or Console(stderr=True), refresh_per_second=4)
        if is_live:
            self._live.start()

    def note(self, text: str) -> None:
        self._notes = (*self._notes, text)[-NUM_NOTES:]
        self._live.refresh()

    def phase(self, name: str) -> None:
        self._phase, self._phase_started, self._progress = name, self._clock(), ""
        self._live.refresh()

    def progress(self, text: str) -> None:
        self._progress = f" ({text})"
        self._live.refresh()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step, self._metrics = step, metrics
        self._seconds_left = self._pace.seconds_left(step, metrics)
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        self._live.refresh()

    def close(self) -> None:
        """Leave the last picture on the terminal, with the seconds of the whole run. Idempotent."""
        self._phase, self._phase_started = "done" if self._step >= self._num_steps else "stopped", self._started
        self._live.stop()

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        progress = ProgressBar(total=self._num_steps, completed=self._step, width=SPARK_STEPS)
        head.add_row(Text(self._name, style="bold", overflow="ellipsis", no_wrap=True), progress)
        if self._rewards:
            reward = Text(number("reward", self._metrics), style="bold")
            head.add_row(Text("reward", style="dim"), Text.assemble(sparkline(self._rewards), "  ", reward))
        details = [Text(self._details())] if self._metrics else []
        if legend := legend_of(self._metrics):
            details.append(Text(legend, style="dim"))
        phase = Text(self._phase_text(), style="cyan")
        return Group(head, phase, *details, *(Text(note, style="dim") for note in self._notes))

    def _phase_text(self) -> str:
        waited = f"{self._phase} {duration(self._clock() - self._phase_started)}{self._progress}"
        return f"step {self._step}/{self._num_steps}   {waited}   left {duration(self._seconds_left)}"

    def _details(self) -> str:
        labels = (label for label in formats_of(self._metrics) if label != "reward")
        return "   ".join(f"{label} {number(label, self._metrics)}" for label in labels)


def sparkline(values: list[float], width: int = SPARK_STEPS) -> str:
    """Return the last `width` values as bars between their own extremes; empty for no values."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(SPARK) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARK[round((value - low) * scale)] for value in shown)
