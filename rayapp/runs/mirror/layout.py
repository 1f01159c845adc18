"""What lies in a run folder, by how it travels: files that are sent when they change, folders that count as a whole.

    config.yaml, metrics.jsonl, rewards.png, tensorboard/…   sent whenever they change
    trajectories/, evaluations/step=000001.parquet           sent once; all before the metrics that speak of them
    checkpoints/step=000010/                                 files first, manifest last
    final/, final's manifest                                 files first, manifest last

Looks at local folders only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator
from pathlib import Path

from rayapp.runs.mirror.ledger import Stamp, stamp_of
from rayapp.runs.tracking.jsonl import read_records

METRICS, CHECKPOINTS, TRAJECTORIES, FINAL, LOCKS = "metrics.jsonl", "checkpoints", "trajectories", "final", "locks"
EVALUATIONS = "evaluations"
EXPORTED = "rayapp.json"
"""In `final/`: of which run and step it is."""
LOCAL_ONLY = frozenset({"run.lock"})
_STEP = re.compile(rf"(?:{TRAJECTORIES}|{EVALUATIONS})/step=(\d+)\.parquet")


def loose_files(folder: Path, sent: Container[str] = ()) -> dict[str, Stamp]:
    """Every file that travels alone, in the order in which they should be sent. Hidden ones are work in progress.

    Args:
        sent: keys of what is safe already. Trajectories among them are left out: they never change, and looking at each
            of thousands every second would cost.
    """
    found: dict[str, Stamp] = {}
    for path in _walk(folder):
        key = path.relative_to(folder).as_posix()
        if key in sent and trajectory_step(key) is not None:
            continue
        try:
            found[key] = stamp_of(path)
        except OSError:
            continue  # removed since it was listed, or a link to nothing
    return dict(sorted(found.items(), key=lambda entry: (entry[0] == METRICS, entry[0])))


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        skipped = {CHECKPOINTS, FINAL, LOCKS} if here == folder else set()
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        yield from (here / name for name in names if not name.startswith(".") and name not in LOCAL_ONLY)


def folder_stamp(folder: Path) -> Stamp | None:
    """Bytes of all files and the newest change; None where there are none."""
    try:
        stamps = [stamp_of(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    except OSError:
        return None
    return (sum(size for size, _ in stamps), max(time for _, time in stamps)) if stamps else None


def trajectory_step(key: str) -> int | None:
    """The step of a trajectory file's key; None for any other key."""
    match = _STEP.fullmatch(key)
    return int(match.group(1)) if match else None


def checkpoint_step(key: str) -> int | None:
    """The step of the checkpoint that a key lies in; None for any other key."""
    match = re.match(r"checkpoints/step=(\d+)/", key)
    return int(match.group(1)) if match else None


def is_of_step_after(key: str, step: int) -> bool:
    """Whether a key is a trajectory file, or in a checkpoint, of a later step."""
    steps = (trajectory_step(key), checkpoint_step(key))
    return any(found is not None and found > step for found in steps)


def last_step(metrics: Path) -> float:
    """Step of the last whole line; infinite where the run keeps no such file."""
    if not metrics.exists():
        return float("inf")
    lines = reversed(metrics.read_bytes().splitlines())
    return next((float(record["step"]) for record in read_records(lines)), -1.0)
