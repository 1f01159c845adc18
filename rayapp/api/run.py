"""Reads a run folder: metrics and trajectories for pandas and Arrow, checkpoints, and a plot of metrics.

The functions work during and after the run, for local folders and s3://. Every call reads the files again.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from rayapp.core.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from rayapp.core.types import Group
    from rayapp.runs.checkpoints import Checkpoint
    from rayapp.runs.source import RunSource, StepFile

Purpose = Literal["train", "eval"]
Steps = int | Sequence[int] | None  # one, several, or None for all
SHOWN = ("reward/mean", "reward/solved/mean", "eval/reward/mean", "learner/entropy", "sft/loss")


class Run:
    """A run that can be read: a folder, or s3://bucket/prefix. Make it with `open_run`; files are read when needed."""

    def __init__(self, uri: str | os.PathLike[str]) -> None:
        self.uri = str(uri)

    def __repr__(self) -> str:
        return f"Run({self.uri!r})"

    @cached_property
    def _source(self) -> RunSource:
        from rayapp.runs.source import open_source

        return open_source(self.uri)

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration with which the run was started."""
        import yaml

        loaded: dict[str, Any] = yaml.safe_load(self._source.read_bytes("config.yaml") or b"{}")
        return loaded

    @property
    def records(self) -> list[dict[str, float]]:
        """The metrics of every logged step, as metrics.jsonl has them."""
        from rayapp.runs.tracking.metrics import read_records

        return list(read_records((self._source.read_bytes("metrics.jsonl") or b"").splitlines()))

    @property
    def metrics(self) -> pd.DataFrame:
        """DataFrame with a row for each step and a column for each metric. A value is NaN if a step lacks the
        metric.
        """
        import pandas

        frame = pandas.DataFrame(self.records)
        return frame.set_index("step") if len(frame) else frame

    def table(self, steps: Steps = None, *, purpose: Purpose = "train") -> Any:
        """Return trajectories as an Arrow table, with the columns of docs/run-folder.md: of one step, several, or all
        (None), and of training or evaluations (`purpose`)."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        chosen = self._step_files(steps, purpose)
        tables = [pq.read_table(f.path, filesystem=self._source.files, partitioning=None) for f in chosen]
        return pa.concat_tables(tables, promote_options="default")

    def groups(self, steps: Steps = None, *, purpose: Purpose = "train") -> Iterator[tuple[int, Group]]:
        """Yield pairs (step, group), with the groups as training had them; see `table`."""
        from rayapp.runs.trajectories import read_groups

        for file in self._step_files(steps, purpose):
            for group in read_groups(file.path, self._source.files):
                yield file.step, group

    def _step_files(self, steps: Steps, purpose: Purpose) -> list[StepFile]:
        wanted = None if steps is None else {steps} if isinstance(steps, int) else set(steps)
        files = [file for file in self._source.step_files() if file.purpose == purpose]
        chosen = sorted((f for f in files if wanted is None or f.step in wanted), key=lambda f: f.step)
        if not chosen:
            what = "evaluations" if purpose == "eval" else "trajectories"
            there = ", ".join(str(file.step) for file in sorted(files, key=lambda f: f.step)[:20]) or "none"
            of_steps = "" if wanted is None else f" of the steps {', '.join(map(str, sorted(wanted)[:20])) or 'none'}"
            raise InputError(f"{self.uri} has no {what}{of_steps}; recorded steps: {there}")
        return chosen

    def trajectories(self, steps: Steps = None, *, purpose: Purpose = "train") -> pd.DataFrame:
        """Return `table` as a pandas DataFrame."""
        frame: pd.DataFrame = self.table(steps, purpose=purpose).to_pandas(maps_as_pydicts="strict")
        return frame

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints on this machine, oldest first. Each has a `path` and a `version`."""
        from pathlib import Path

        from rayapp.config.sections import CheckpointSection
        from rayapp.runs.checkpoints import CheckpointFolder

        return CheckpointFolder(Path(self.uri) / "checkpoints", CheckpointSection()).whole()

    @property
    def model(self) -> str | None:
        """Location of `final/`, the trained model as a Hugging Face folder; None if it doesn't exist yet."""
        return f"{self.uri.rstrip('/')}/final" if self._source.stamp("final/config.json") else None

    def plot(self, *metrics: str) -> Figure:
        """Plot these metrics over the steps, one below the other. Without names, plot the most common metrics."""
        return _picture(self.records, metrics or SHOWN, title=self.name)


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder, or s3://bucket/prefix of one, for reading."""
    run = Run(path)
    _ = run.name
    return run


def _picture(records: Sequence[dict[str, float]], keys: Sequence[str], *, title: str) -> Figure:
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            held = io.BytesIO()
            self.savefig(held, format="png", dpi=100)
            return held.getvalue()

    found = {key: [(r["step"], r[key]) for r in records if key in r] for key in keys}
    shown = {key: points for key, points in found.items() if points}
    if not shown:
        raise InputError(f"run {title!r} has none of the metrics {', '.join(keys)}; `Run.records` has all metrics")
    figure = Picture(figsize=(8, 2.2 * len(shown)), layout="constrained")
    for axes, (key, points) in zip(
        figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0], shown.items(), strict=True
    ):
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 40 else None)
        axes.set_ylabel(key)
        axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    figure.suptitle(title)
    return figure
