"""Which run of a tracking service belongs to a run folder, so that a resumed run goes on in the same one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from rayapp.core.files import write_text

FILE = "trackers.json"


def remembered_id(folder: Path, service: str, make: Callable[[], str]) -> str:
    """The id kept in `trackers.json` for a service, or a new one, which is kept.

    Args:
        make: called when none is kept; what it makes is kept only when it succeeds.
    """
    file = folder / FILE
    try:
        kept: dict[str, str] = json.loads(file.read_text())
    except (OSError, ValueError):
        kept = {}
    if service not in kept:
        # Read again after making: another tracker's thread may have kept its own meanwhile.
        made = make()
        kept = json.loads(file.read_text()) if file.exists() else {}
        kept[service] = made
        write_text(file, json.dumps(kept, indent=1))
    return kept[service]
