"""TensorBoard: one event file in `<run>/tensorboard`. Only the driver writes it. Show it with `tensorboard --logdir`.

Written with TensorBoard's own event writer, so that neither torch nor TensorFlow is loaded into the driver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorboardTracker:
    """Writes scalars.

    Args:
        folder: made if missing; every start of the run adds a file.
        first_step: TensorBoard forgets what earlier files say of this step and later ones: a resumed run takes them
            again.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=key, simple_value=value) for key, value in metrics.items() if math.isfinite(value)]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
