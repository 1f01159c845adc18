"""Trackers for TensorBoard and Weights & Biases.

TensorBoard gets one event file in `<run>/tensorboard`, written with its own event writer, which loads neither torch nor
TensorFlow into the driver. Weights & Biases is offline by default: files in `<run>/wandb`, sent with `wandb sync`.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rayapp.config.config import Config
from rayapp.core.protocols import Tracker
from rayapp.runs.tracking.background import remembered_id
from rayapp.runs.tracking.trackers import flattened


def tensorboard(config: Config, path: Path, first_step: int) -> Tracker:
    return TensorboardTracker(path / "tensorboard", first_step)


def wandb(config: Config, path: Path, first_step: int) -> Tracker:
    parameters = flattened(config.model_dump(mode="json"))
    return WandbTracker(path, project=config.tracking.project, mode=_wandb_mode(), parameters=parameters)


def _wandb_mode() -> Literal["offline", "online"]:
    return "online" if os.environ.get("WANDB_MODE") == "online" else "offline"


class TensorboardTracker:
    """Writes scalars, a file for each start of the run; later files replace earlier ones from `first_step` on."""

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
    """Logs to one W&B run, the same one after a resume; online it needs WANDB_API_KEY."""

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
