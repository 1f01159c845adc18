"""`rayapp train CONFIG --replay RUN`: trains on a run's recorded trajectories, without servers or sandboxes.

A replay is for debugging and measuring the learner. Starting from CONFIG's model, it trains on each recorded step in
order, writes the metrics, and compares them with the recorded metrics. With its own config a synchronous run on CPU is
repeated to the last bit. A replay writes neither checkpoints nor a model.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayapp.config.config import Config, with_values
from rayapp.core.aio import run_until_done
from rayapp.core.errors import InputError, RunFolderError
from rayapp.core.logs import start_logs
from rayapp.core.timing import Phases
from rayapp.core.trajectories import summarize_group
from rayapp.driver.cluster import open_learners
from rayapp.driver.sft import after_warmup
from rayapp.runs.folder import RunFolder
from rayapp.runs.tracking.metrics import read_metrics, summarize_step
from rayapp.runs.tracking.trackers import make_trackers
from rayapp.runs.trajectories import read_groups
from rayapp.storage.models.check import check_model, check_teacher

REPEATED = (
    "learner/",
    "distillation/",
    "rollout_probs_diff/",
    "rollout_log_probs_diff/",
    "rollout_corr/",
    "reward/",
    "length/",
)
"""Prefixes of the metrics that depend only on the weights and the trajectories."""


def run_replay(config: Config, recorded: Path) -> None:
    """Run `rayapp train --replay`.

    Args:
        recorded: folder of a run that kept its trajectories.
    Raises:
        UserError: no trajectories were recorded, or this run's folder holds another run.
    """
    start_logs(config.run.name, config.tracking.log_format)
    config = apart_from(after_warmup(config), recorded)
    check_model(config)
    check_teacher(config)
    files = trajectory_files(recorded, config.train.num_steps)
    with RunFolder.open(config) as folder:
        if folder.checkpoints.latest() is not None:
            raise RunFolderError(f"{folder.path} holds a run with checkpoints: give the replay another run.name.")
        folder.truncate_after(0)
        run_until_done(_run(config, folder, files, recorded_metrics(recorded)))


def apart_from(config: Config, recorded: Path) -> Config:
    """Return the config, with another run.name if it would overwrite the recorded run."""
    if config.run_folder.resolve() != recorded.resolve():
        return config
    return with_values(config, run={"name": f"{config.run.name}-replay"})


def trajectory_files(recorded: Path, num_steps: int) -> list[Path]:
    """Return `trajectories/step=NNNNNN.parquet` of steps 1, 2, …, at most `num_steps` of them.

    Raises:
        InputError: there are no files, or one is missing in between.
    """
    folder = recorded / "trajectories"
    files = sorted(folder.glob("step=*.parquet"))[:num_steps]
    if not files:
        raise InputError(
            f"{folder} holds no trajectories. Give --replay the folder of a run that was trained with "
            "tracking.trajectories: true, e.g. outputs/coding_cpu."
        )
    steps = [int(file.stem.removeprefix("step=")) for file in files]
    if steps != list(range(1, len(files) + 1)):
        missing = sorted(set(range(1, steps[-1] + 1)) - set(steps))
        raise InputError(
            f"{folder} has no trajectories of the steps {', '.join(map(str, missing[:10]))}: a replay needs every step "
            "from step 1 on."
        )
    return files


def recorded_metrics(recorded: Path) -> dict[int, dict[str, float]]:
    """Return the recorded metrics by step; empty if the run recorded no metrics."""
    return {int(record["step"]): record for record in read_metrics(recorded / "metrics.jsonl")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Metric whose value differs from its recorded value."""

    step: int
    name: str
    recorded: float
    replayed: float


def differences(
    step: int, recorded: Mapping[str, float], replayed: Mapping[str, float]
) -> tuple[int, list[Difference]]:
    """Return the number of compared metrics, and the metrics that differ in any bit."""
    names = [name for name in sorted(recorded) if name.startswith(REPEATED) and name in replayed]
    found = [
        Difference(step=step, name=name, recorded=recorded[name], replayed=replayed[name])
        for name in names
        if recorded[name] != replayed[name] and not (math.isnan(recorded[name]) and math.isnan(replayed[name]))
    ]
    return len(names), found


async def _run(
    config: Config, folder: RunFolder, files: Sequence[Path], recorded: Mapping[int, Mapping[str, float]]
) -> None:
    num_compared, found = 0, list[Difference]()
    with make_trackers(config, folder) as tracker:
        tracker.phase("starting")
        async with open_learners(config, report=tracker.note) as learners:
            for step, file in enumerate(files, start=1):
                phases = Phases(on_change=tracker.phase)
                with phases("record"):
                    groups = await asyncio.to_thread(read_groups, file)
                summaries = tuple(summarize_group(group, time_total_s=0.0) for group in groups)
                with phases("train"):
                    metrics = await learners.train_on(step, summaries, groups)
                metrics = summarize_step(summaries, version=step - 1) | metrics
                number, differ = differences(step, recorded.get(step, {}), metrics)
                num_compared, found = num_compared + number, found + differ
                tracker.log(step, metrics | phases.metrics(summaries) | {"replay/differ": float(len(differ))})
        for line in report_lines(num_compared, found):
            tracker.note(line)


def report_lines(num_compared: int, found: Sequence[Difference]) -> Iterator[str]:
    """Yield lines with the number of metrics that the replay repeated."""
    if not num_compared:
        yield "replayed; the run recorded no metrics to compare with"
    elif not found:
        yield f"replayed: all {num_compared} metrics equal the recorded ones to the last bit"
    else:
        yield f"replayed: {len(found)} of {num_compared} metrics differ from the recorded ones. The first are:"
        for d in found[:5]:
            yield f"  step {d.step} {d.name}: {d.recorded!r} recorded, {d.replayed!r} now"
