"""The files of a run folder by how they are uploaded, and the record of finished uploads (`.mirror.json`).

    config.yaml, metrics.jsonl, rewards.png, tensorboard/…   sent whenever they change
    trajectories/, evaluations/step=000001.parquet           sent once; always before the metrics of their steps
    checkpoints/step=000010/                                 files first, manifest last
    final/, final's manifest                                 files first, manifest last

Looks at local folders only. With the record, a second start uploads only the rest. It is a cache: without it files are
uploaded again, but never lost.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rayapp.core.errors import RunFolderError
from rayapp.core.files import write_text
from rayapp.runs.tracking.metrics import read_records

NAME = ".mirror.json"
_FORMAT = 1

Stamp = tuple[int, int]
"""Size in bytes and time of change in ns of a file: a different stamp means different content."""


def stamp_of(path: Path) -> Stamp:
    """Return a file's stamp. Raises OSError: the file is gone."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The finished uploads of one staging folder.

    Example: `{"format": 1, "uri": "s3://b/run", "generation": 2, "files": {"metrics.jsonl": [812, 1763…]}}`.
    """

    folder: Path
    uri: str
    generation: int = 0
    """Number of the last lock that this machine held on the remote folder. If the folder has a higher number, another
    run has written to it since."""
    files: dict[str, Stamp] = field(default_factory=dict)
    """Stamp of the local file when it was sent, by key. Complete folders (`final`) are one entry."""

    def save(self) -> None:
        content = {"format": _FORMAT, "uri": self.uri, "generation": self.generation, "files": self.files}
        write_text(self.folder / NAME, json.dumps(content))

    @classmethod
    def load(cls, folder: Path) -> Ledger | None:
        """Read the folder's record; None if it is missing or incomplete.

        Raises:
            RunFolderError: a newer version wrote it.
        """
        try:
            raw = json.loads((folder / NAME).read_text())
            if raw["format"] > _FORMAT:
                raise RunFolderError(
                    f"{folder / NAME} was written by a newer rayapp: its format is {raw['format']}, and this version "
                    f"reads {_FORMAT}. Use the newer version."
                )
            files = {str(key): (int(size), int(time)) for key, (size, time) in raw["files"].items()}
            return cls(folder=folder, uri=raw["uri"], generation=int(raw["generation"]), files=files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


METRICS, CHECKPOINTS, TRAJECTORIES, FINAL, LOCKS = "metrics.jsonl", "checkpoints", "trajectories", "final", "locks"
EVALUATIONS, PROFILES = "evaluations", "profiles"
EXPORTED = "rayapp.json"
"""File in `final/` that names the model's run and step."""
LOCAL_ONLY = frozenset({"run.lock"})
_STEP = re.compile(rf"(?:{TRAJECTORIES}|{EVALUATIONS})/step=(\d+)\.parquet")


def loose_files(folder: Path, sent: Container[str] = ()) -> dict[str, Stamp]:
    """Return the files that are sent one by one, in the order of sending. Hidden files are work in progress.

    Args:
        sent: keys already stored. Trajectories that are stored are left out: they never change, and checking thousands
            of files every second would be slow.
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
    """Return the size in bytes of all files and the newest change; None if there are no files."""
    try:
        stamps = [stamp_of(path) for path in sorted(folder.rglob("*")) if path.is_file()]
    except OSError:
        return None
    return (sum(size for size, _ in stamps), max(time for _, time in stamps)) if stamps else None


def trajectory_step(key: str) -> int | None:
    """Return the step of a trajectory file's key; None for any other key."""
    match = _STEP.fullmatch(key)
    return int(match.group(1)) if match else None


def checkpoint_step(key: str) -> int | None:
    """Return the step of the checkpoint that a key lies in; None for any other key."""
    match = re.match(r"checkpoints/step=(\d+)/", key)
    return int(match.group(1)) if match else None


def is_of_step_after(key: str, step: int) -> bool:
    """Return True if a key belongs to a later step: it is a trajectory file, or lies in a checkpoint or profile."""
    profile = re.match(rf"{PROFILES}/step=(\d+)/", key)
    steps = (trajectory_step(key), checkpoint_step(key), int(profile[1]) if profile else None)
    return any(found is not None and found > step for found in steps)


def last_step(metrics: Path) -> float:
    """Return the step of the last complete line; infinite if the run keeps no such file."""
    if not metrics.exists():
        return float("inf")
    lines = reversed(metrics.read_bytes().splitlines())
    return next((float(record["step"]) for record in read_records(lines)), -1.0)
