"""What a check found, and how it travels from its process to the table and the report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["ok", "problem", "left out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row."""

    level: Level
    figure: str
    """What was measured, or what went wrong, in one line."""
    cure: str = ""
    """What to do; for problems."""
    details: dict[str, Any] = field(default_factory=dict)
    """Numbers for the report: plain JSON."""


def judged(figure: str, problem: str = "", cure: str = "", **details: Any) -> Outcome:
    """ok with its figure, or a problem with both."""
    shown = f"{figure}: {problem}" if problem else figure
    return Outcome(level="problem" if problem else "ok", figure=shown, cure=cure if problem else "", details=details)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """What every check is given."""

    device: Literal["gpu", "cpu"]
    num_gpus: int
    """GPUs to use; on a CPU processes where a check wants several."""
    model: str
    """The user's model; empty: one of random weights, made by the check."""
    folder: Path
    """An empty folder that this check alone uses."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "gpu"


def first_devices(count: int) -> str:
    """CUDA_VISIBLE_DEVICES of the first so many GPUs that this process may use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(count)]
    return ",".join(names[:count])
