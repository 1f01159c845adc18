"""Combines all trackers of a run, and has the trackers for TensorBoard and Weights & Biases.

Only the driver writes, in step order; a tracker that fails never stops training.

TensorBoard gets one event file in `<run>/tensorboard` (`tensorboard --logdir`), written with its own event writer, so
that neither torch nor TensorFlow is loaded into the driver. Weights & Biases is offline unless the configuration says
otherwise: files in `<run>/wandb`, sent with `wandb sync`.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from rayapp.config.config import Config
from rayapp.config.sections import TRACKERS
from rayapp.core.errors import ConfigError
from rayapp.core.logs import visible
from rayapp.core.names import load_plugin
from rayapp.core.protocols import Tracker
from rayapp.core.types import Group
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.background import BackgroundTracer, BackgroundTracker, RolloutTracer, remembered_id
from rayapp.runs.tracking.console import LineConsole, LiveConsole, LogConsole, NotebookConsole, in_notebook
from rayapp.runs.tracking.metrics import JsonlTracker, MismatchWatch, SignalWatch
from rayapp.storage.models.tokenizer import load_tokenizer

log = logging.getLogger(__name__)


class RunTracker:
    """Passes records to all configured trackers.

    Args:
        trackers: trackers by name.
        console: also shows phases; None without the console tracker.
    """

    def __init__(self, trackers: Mapping[str, Tracker], console: LineConsole | LiveConsole | None) -> None:
        self._trackers = dict(trackers)
        self._console = console
        self._num_failed: dict[str, int] = {}
        self.more_metrics: Callable[[Mapping[str, float]], Mapping[str, float]] = lambda metrics: {}
        """Function that returns further metrics for each step, e.g. the run's costs."""
        self._signal, self._mismatch = SignalWatch(), MismatchWatch()

    def add(self, name: str, tracker: Tracker) -> None:
        """Add a tracker for the rest of the run; it is closed with the others."""
        self._trackers[name] = tracker

    def note(self, text: str) -> None:
        """Print a line on the console, e.g. an address, or a file that was written."""
        if self._console is not None:
            with self._guarded("console"):
                self._console.note(visible(text))

    def phase(self, name: str) -> None:
        """Show the phase that the driver waits for."""
        if self._console is not None:
            with self._guarded("console"):
                self._console.phase(name)

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
    """Check that the chosen trackers' packages are installed, before anything starts. Raises ConfigError."""
    for name in chosen:
        if name not in TRACKERS:
            load_plugin("trackers", name)
    missing = [name for name in chosen if name in (*_SERVICES, "mlflow") and find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"tracking.trackers: packages are not installed: {', '.join(missing)}. Run pip install "
            f"{' '.join(missing)}, or remove these trackers"
        )


def _tensorboard(config: Config, path: Path, first_step: int) -> Tracker:
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
    section = config.tracking
    return WandbTracker(path, project=section.project, mode=section.wandb_mode, parameters=flattened(config))


_SERVICES: dict[str, Callable[[Config, Path, int], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def flattened(config: Config) -> dict[str, str]:
    """Flatten the configuration to `section.key` -> JSON text.

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
    """Make a live console only if stdout and stderr are terminals: `rayapp train | tee log` must write lines to the
    log.
    """
    if config.tracking.log_format == "json":
        return LogConsole(config.train.num_steps)
    if in_notebook():
        return NotebookConsole(config.train.num_steps, config.run.name)
    terminal = Console(stderr=True)
    if terminal.is_interactive and sys.stdout.isatty():
        return LiveConsole(config.train.num_steps, config.run.name, terminal)
    return LineConsole(config.train.num_steps)


class TensorboardTracker:
    """Writes scalars.

    Args:
        folder: made if missing; every start of the run adds a file.
        first_step: TensorBoard drops data of earlier files from this step on: a resumed run repeats those steps.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        # Two seconds of imports (TensorBoard loads boto3): only runs with this tracker pay for them.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        self._writer = EventFileWriter(str(folder))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._summary.Value
        values = [value(tag=key, simple_value=number) for key, number in metrics.items() if math.isfinite(number)]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Logs to one W&B run, the same one after a resume.

    Args:
        folder: the run folder, whose name is the run's.
        project: W&B project.
        mode: online needs WANDB_API_KEY.
        parameters: the flattened configuration.
    """

    def __init__(
        self, folder: Path, *, project: str, mode: Literal["offline", "online"], parameters: Mapping[str, str]
    ) -> None:
        import wandb  # a second: only runs with this tracker pay for it

        self._teardown = wandb.teardown
        run_id = remembered_id(folder, "wandb", lambda: secrets.token_hex(8))
        self._run = wandb.init(
            dir=str(folder),
            project=project,
            name=folder.name,
            id=run_id,
            resume="allow",
            mode=mode,
            config=dict(parameters),
            # Don't record the process's output, its code or the machine's load.
            settings=wandb.Settings(
                silent=True, console="off", save_code=False, disable_git=True, x_disable_stats=True, init_timeout=60.0
            ),
        )
        # Use the run's steps as the axis: W&B's counter only grows, and would drop steps that a resumed run repeats.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: value for key, value in metrics.items() if math.isfinite(value)} | {"step": step})

    def close(self) -> None:
        self._run.finish()
        # W&B's own process writes the file and may still be busy: wait until it has ended.
        self._teardown()
