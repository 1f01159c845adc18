"""Combines all trackers of a run. Only the driver writes, in step order; a tracker that fails never stops training."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec

from rich.console import Console

from rayapp.config.config import Config
from rayapp.config.sections import TRACKERS
from rayapp.core.errors import ConfigError
from rayapp.core.logs import visible
from rayapp.core.names import load_extra, load_plugin
from rayapp.core.protocols import Tracker
from rayapp.core.types import Group
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.background import BackgroundTracer, BackgroundTracker
from rayapp.runs.tracking.console import LineConsole, LiveConsole
from rayapp.runs.tracking.metrics import JsonlTracker, MismatchWatch, SignalWatch

log = logging.getLogger(__name__)


class RunTracker:
    """Passes records to all configured trackers. `console` also shows phases."""

    def __init__(self, trackers: Mapping[str, Tracker], console: LineConsole | LiveConsole | None) -> None:
        self._trackers = dict(trackers)
        self._console = console
        self._num_failed: dict[str, int] = {}
        # Function that returns further metrics for each step, e.g. the run's costs.
        self.more_metrics: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda metrics: {}
        self._signal, self._mismatch = SignalWatch(), MismatchWatch()

    def add(self, name: str, tracker: Tracker) -> None:
        """Add a tracker for the rest of the run; it is closed with the others."""
        self._trackers[name] = tracker

    def note(self, text: str) -> None:
        if self._console is not None:
            with self._guarded("console"):
                self._console.note(visible(text))

    def phase(self, name: str) -> None:
        if self._console is not None:
            with self._guarded("console"):
                self._console.phase(name)

    def progress(self, text: str) -> None:
        if self._console is not None:
            with self._guarded("console"):
                self._console.progress(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step to every tracker. Failures are logged once per tracker and counted in `tracking/failed`."""
        metrics = {**metrics, **self.more_metrics(metrics)} | {"tracking/failed": float(sum(self._num_failed.values()))}
        for name, tracker in self._trackers.items():
            with self._guarded(name):
                tracker.log(step, metrics)
        if self._signal.record(metrics):
            self.note(self._signal.warning())
        if warning := self._mismatch.record(metrics):
            self.note(warning)

    def trace(self, step: int, groups: Sequence[Group]) -> None:
        """Send the rollouts of one step to every tracker that takes them."""
        for name, tracker in self._trackers.items():
            if isinstance(tracker, BackgroundTracer):
                with self._guarded(name):
                    tracker.trace(step, groups)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # boundary: a failing tracker must not end the run
            if name not in self._num_failed:
                kind = type(error).__name__
                log.warning("tracker %s failed and may miss steps from now on: %s: %s", name, kind, error)
            self._num_failed[name] = self._num_failed.get(name, 0) + 1

    def close(self) -> None:
        """Close every tracker. If the run learned nothing, first print a warning."""
        if text := self._signal.summary():
            self.note(text)
        for name, tracker in self._trackers.items():
            with self._guarded(name):
                tracker.close()


@contextmanager
def make_trackers(config: Config, folder: RunFolder) -> Iterator[RunTracker]:
    """Make the trackers in `tracking.trackers`; they are closed at the end of the block."""
    chosen, path = config.tracking.trackers, folder.path
    check_packages(chosen)
    trackers: dict[str, Tracker] = {}
    console: LineConsole | LiveConsole | None = None
    if "jsonl" in chosen:
        trackers["jsonl"] = JsonlTracker(path / "metrics.jsonl")
    if "console" in chosen:
        console = trackers["console"] = _console(config.run.name, config.train.num_steps, config.tracking.log_format)
    for name in chosen:
        if name not in ("jsonl", "console"):
            make = partial(load_extra(EXTRAS[name]) if name in EXTRAS else load_plugin("trackers", name), config, path)
            is_tracer = name in TRACERS and config.tracking.trace_ratio > 0
            trackers[name] = BackgroundTracer(name, make) if is_tracer else BackgroundTracker(name, make)
    with closing(RunTracker(trackers, console)) as tracker:
        yield tracker


def check_packages(chosen: Sequence[str]) -> None:
    """Raise ConfigError if a chosen tracker's package is not installed."""
    for name in chosen:
        if name not in TRACKERS:
            load_plugin("trackers", name)
    missing = [name for name in chosen if name in EXTRAS and find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"tracking.trackers: packages are not installed: {', '.join(missing)}. Run pip install "
            f"{' '.join(missing)}, or remove these trackers"
        )


# Function that makes a tracker from configuration, run folder and first step.
EXTRAS = {
    "tensorboard": "trackers.services:tensorboard",
    "wandb": "trackers.services:wandb",
    "mlflow": "trackers.mlflow_tracker:mlflow",
}
TRACERS = frozenset({"mlflow"})  # also take rollouts


def flattened(sections: Mapping[str, object]) -> dict[str, str]:
    """Flatten the configuration to `section.key` -> JSON text, e.g. {"run.name": '"seed0"', "train.num_steps":
    "40"}."""
    flat: dict[str, str] = {}
    pending: list[tuple[str, object]] = list(sections.items())
    for key, value in pending:
        if isinstance(value, dict) and value:
            pending += [(f"{key}.{inner}", item) for inner, item in value.items()]
        else:
            flat[key] = json.dumps(value)
    return flat


def _console(name: str, num_steps: int, log_format: str) -> LineConsole | LiveConsole:
    """Make a live console only if stdout and stderr are terminals: `rayapp train | tee log` must write lines."""
    if log_format == "json":
        return LineConsole(num_steps, write=log.info)
    terminal = Console(stderr=True)
    if terminal.is_interactive and sys.stdout.isatty():
        return LiveConsole(num_steps, name, terminal)
    return LineConsole(num_steps)
