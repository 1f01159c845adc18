"""Names in a run folder. A checkpoint, a profile and a step's trajectories have the step in their name.

checkpoints/step=000010/   profiles/step=000003/   trajectories/step=000001.parquet   evaluations/step=000010.parquet
"""

from __future__ import annotations

import re
from pathlib import Path

METRICS, CHECKPOINTS, TRAJECTORIES, FINAL = "metrics.jsonl", "checkpoints", "trajectories", "final"
EVALUATIONS, PROFILES = "evaluations", "profiles"
PICTURES = "pictures"  # folder with each picture once, under its SHA-256
RECORDED = (TRAJECTORIES, EVALUATIONS)  # with a parquet file for each step
PARQUET = ".parquet"
_STEP = re.compile(r"step=(\d+)(?:\.parquet)?")


def step_name(step: int, suffix: str = "") -> str:
    """`step=000010`; names sort as steps do."""
    return f"step={step:06d}{suffix}"


def step_of(name: str) -> int | None:
    """Return the step of a name made by `step_name`; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps_in(folder: Path, suffix: str = "", *, after: int = -1) -> list[Path]:
    """Return the paths in a folder that `step_name` made with this suffix for later steps, oldest first."""
    found = [(step_of(path.name), path) for path in folder.glob(f"step=*{suffix}")]
    return [path for step, path in sorted((step, path) for step, path in found if step is not None) if step > after]
