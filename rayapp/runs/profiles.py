"""Profiles of steps (`train.profile_steps`): torch's traces of learner 0 and server 0, in Chrome's format.

The learner records the first micro-batches of each pass, the engine its first iterations, so that traces stay small.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.files import aside
from rayapp.runs.layout import PROFILES, step_name

MOST_MICRO_BATCHES, MOST_ITERATIONS = 8, 64
_MAX_TRACE_BYTES = 64 << 20
_OF_FIRST_RANK = re.compile(r"rank-?0\..*trace\.json\.gz$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    process: str  # e.g. `learner-0`
    trace: bytes  # Chrome's, gzipped
    covers: str  # e.g. `8 of 24 micro-batches`


def read_trace(file: Path) -> bytes:
    """Return a trace file's bytes. ValueError: it is too large to be kept."""
    if (size := file.stat().st_size) > _MAX_TRACE_BYTES:
        raise ValueError(
            f"the trace is too large: it has {size >> 20} MiB, and the maximum is {_MAX_TRACE_BYTES >> 20} MiB"
        )
    return file.read_bytes()


def take_engine_trace(folder: Path) -> bytes:
    """Return the trace of an engine's first rank, and delete the files that vLLM wrote. ValueError: there is none."""
    try:
        return read_trace(max(path for path in folder.iterdir() if _OF_FIRST_RANK.search(path.name)))
    finally:
        for path in folder.iterdir():
            path.unlink(missing_ok=True)


def write_profile(run_folder: Path, step: int, profiles: Sequence[Profile]) -> None:
    """Write the traces of a step. Call it in a thread."""
    folder = run_folder / PROFILES / step_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    for profile in profiles:
        with aside(folder / f"{profile.process}.json.gz") as file:
            file.write_bytes(profile.trace)
