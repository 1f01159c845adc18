"""The trackers of a run as one. Only the driver writes, in step order; a tracker that fails never stops training."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from rayapp.config.config import Config
from rayapp.config.sections import TRACKERS
from rayapp.core.errors import ConfigError
from rayapp.core.names.plugins import load_plugin
from rayapp.core.protocols import Tracker
from rayapp.core.terminal import visible
from rayapp.core.types import Group
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.background import BackgroundTracer, BackgroundTracker, RolloutTracer
from rayapp.runs.tracking.console import LineConsole, LiveConsole, LogConsole, NotebookConsole, in_notebook
from rayapp.runs.tracking.jsonl import JsonlTracker
from rayapp.storage.models.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


class RunTracker:
    """Fans out to the configured trackers.

    Args:
        trackers: by name.
        console: shows phases as well; None without the console tracker.
    """

    def __init__(self, trackers: Mapping[str, Tracker], console: LineConsole | LiveConsole | None) -> None:
        self._trackers = dict(trackers)
        self._console = console
        self._num_failed: dict[str, int] = {}

    def add(self, name: str, tracker: Tracker) -> None:
        """One more tracker, for the rest of the run; closed with the others."""
        self._trackers[name] = tracker

    def note(self, text: str) -> None:
        """A line for people: where to look, what has started, what was written."""
        if self._console is not None:
            with self._guarded("console"):
                self._console.note(visible(text))

    def phase(self, name: str) -> None:
        """What the driver waits for now."""
        if self._console is not None:
            with self._guarded("console"):
                self._console.phase(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step to every tracker. Failures are reported once per tracker and counted in `tracking/failed`."""
        metrics = dict(metrics) | {"tracking/failed": float(sum(self._num_failed.values()))}
        for name, tracker in self._trackers.items():
            with self._guarded(name):
                tracker.log(step, metrics)

    def trace(self, step: int, groups: Sequence[Group]) -> None:
        """The rollouts of one step to every tracker that takes them."""
        for name, tracker in self._trackers.items():
            if isinstance(tracker, BackgroundTracer):
                with self._guarded(name):
                    tracker.trace(step, groups)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # boundary: a tracker is never worth a run
            if name not in self._num_failed:
                kind = type(error).__name__
                log.warning("tracker %s failed and may miss steps from now on: %s: %s", name, kind, error)
            self._num_failed[name] = self._num_failed.get(name, 0) + 1

    def close(self) -> None:
        for name, tracker in self._trackers.items():
            with self._guarded(name):
                tracker.close()


@contextmanager
def make_trackers(config: Config, folder: RunFolder) -> Iterator[RunTracker]:
    """The trackers that `tracking.trackers` names, closed at the end of the block."""
    with closing(_make(config, folder.path)) as tracker:
        yield tracker


def _make(config: Config, path: Path) -> RunTracker:
    chosen = config.tracking.trackers
    check_packages(chosen)
    trackers: dict[str, Tracker] = {}
    console: LineConsole | LiveConsole | None = None
    if "jsonl" in chosen:
        trackers["jsonl"] = JsonlTracker(path / "metrics.jsonl")
    if "console" in chosen:
        console = trackers["console"] = _console(config)
    of_plugins = {name: load_plugin("trackers", name) for name in chosen if name not in TRACKERS}
    for name, make in (_SERVICES | of_plugins).items():
        if name in chosen:
            trackers[name] = BackgroundTracker(name, partial(make, config, path))
    if "mlflow" in chosen:
        ratio, seed = config.tracking.trace_ratio, config.run.seed
        trackers["mlflow"] = BackgroundTracer("mlflow", partial(_mlflow, config, path), ratio=ratio, seed=seed)
    return RunTracker(trackers, console)


def check_packages(chosen: Sequence[str]) -> None:
    """Raises ConfigError: a tracker was asked for by name, so its absence is told before anything starts."""
    for name in chosen:
        if name not in TRACKERS:
            load_plugin("trackers", name)
    missing = [name for name in chosen if name in (*_SERVICES, "mlflow") and find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"tracking.trackers names {', '.join(missing)}, but the package is not installed here: "
            f"pip install {' '.join(missing)}, or leave it out"
        )


def _tensorboard(config: Config, path: Path, first_step: int) -> Tracker:
    from rayapp.runs.tracking.tensorboard_tracker import TensorboardTracker

    return TensorboardTracker(path / "tensorboard", first_step)


def _mlflow(config: Config, path: Path, first_step: int) -> RolloutTracer:
    from rayapp.runs.tracking.mlflow_tracker import MlflowTracker

    section = config.tracking
    return MlflowTracker(
        path,
        uri=section.mlflow_uri,
        experiment=section.project,
        parameters=flattened(config),
        load_decode=lambda: partial(load_tokenizer(config).decode, skip_special_tokens=False),
    )


def _wandb(config: Config, path: Path, first_step: int) -> Tracker:
    from rayapp.runs.tracking.wandb_tracker import WandbTracker

    section = config.tracking
    return WandbTracker(path, project=section.project, mode=section.wandb_mode, parameters=flattened(config))


_SERVICES: dict[str, Callable[[Config, Path, int], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def flattened(config: Config) -> dict[str, str]:
    """The configuration as `section.key` -> JSON text.

    Example: {"run.name": '"seed0"', "train.num_steps": "40"}.
    """
    flat: dict[str, str] = {}
    pending: list[tuple[str, object]] = list(config.model_dump(mode="json").items())
    for key, value in pending:
        if isinstance(value, dict) and value:
            pending += [(f"{key}.{inner}", item) for inner, item in value.items()]
        else:
            flat[key] = json.dumps(value)
    return flat


def _console(config: Config) -> LineConsole | LiveConsole:
    """Live only where somebody watches both streams: `rayapp train | tee log` must leave its lines in the log."""
    if config.tracking.log_format == "json":
        return LogConsole(config.train.num_steps)
    if in_notebook():
        return NotebookConsole(config.train.num_steps, config.run.name)
    terminal = Console(stderr=True)
    if terminal.is_interactive and sys.stdout.isatty():
        return LiveConsole(config.train.num_steps, config.run.name, terminal)
    return LineConsole(config.train.num_steps)
