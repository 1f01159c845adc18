"""Writes the profiles of steps (`train.profile_steps`) to the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rayapp.core.files import aside
from rayapp.core.timing import Profile
from rayapp.runs.layout import PROFILES, step_name


def write_profile(run_folder: Path, step: int, profiles: Sequence[Profile]) -> None:
    """Write the traces of a step. Call it in a thread."""
    folder = run_folder / PROFILES / step_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    for profile in profiles:
        with aside(folder / f"{profile.process}.json.gz") as file:
            file.write_bytes(profile.trace)
