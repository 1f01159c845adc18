"""What a checkpoint keeps of the store: finished groups that wait to be trained on, and ids that are done early.

    checkpoints/step=N/groups/{waiting.parquet, ahead.json}

Only asynchronous runs have either: a synchronous one generates its groups again, together, so that it repeats. Written
by the saver before a checkpoint counts, read when a run goes on from one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.errors import InputError
from rayapp.core.files import write_text
from rayapp.core.types import Group
from rayapp.runs.trajectories import read_groups, write_trajectories

FOLDER, WAITING, AHEAD = "groups", "waiting.parquet", "ahead.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptGroups:
    """See the module."""

    waiting: tuple[Group, ...] = ()
    done_ahead: tuple[int, ...] = ()
    """Ids above the first untrained one that have been trained or dropped: they overtook a straggler."""

    def write(self, checkpoint: Path, version: int) -> None:
        """Into the folder of a checkpoint that is being written."""
        if not self.waiting and not self.done_ahead:
            return
        folder = checkpoint / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_trajectories(folder / WAITING, version, self.waiting)
        write_text(folder / AHEAD, json.dumps(list(self.done_ahead)))

    @classmethod
    def read(cls, checkpoint: Path) -> KeptGroups:
        """What a whole checkpoint keeps; nothing from one without the folder.

        Raises:
            InputError: a file is not readable.
        """
        folder = checkpoint / FOLDER
        if not folder.exists():
            return cls()
        try:
            ahead: list[int] = json.loads((folder / AHEAD).read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"{folder / AHEAD} can't be read: {error}. The checkpoint is damaged.") from None
        return cls(waiting=tuple(read_groups(folder / WAITING)), done_ahead=tuple(ahead))
