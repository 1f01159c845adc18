"""What of a staging folder is safe in object storage: `.mirror.json`, so that a second start sends only the rest.

A cache: losing it costs uploads of what is there already, never a file. Used by the rest of `rayapp.runs.mirror` only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from rayapp.core.errors import RunFolderError
from rayapp.core.files import write_text

NAME = ".mirror.json"
_FORMAT = 1

Stamp = tuple[int, int]
"""Bytes and time of change in ns of a file: another stamp is another content."""


def stamp_of(path: Path) -> Stamp:
    """Raises OSError: it is gone."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The uploads of one staging folder.

    Example: `{"format": 1, "uri": "s3://b/run", "generation": 2, "files": {"metrics.jsonl": [812, 1763…]}}`.
    """

    folder: Path
    uri: str
    generation: int = 0
    """Number of the last lock on the remote folder that was held here; a higher one there: others wrote since."""
    files: dict[str, Stamp] = field(default_factory=dict)
    """By key, the stamp that the local file had when it was sent. Whole folders (`final`) are one entry."""

    def save(self) -> None:
        content = {"format": _FORMAT, "uri": self.uri, "generation": self.generation, "files": self.files}
        write_text(self.folder / NAME, json.dumps(content))

    @classmethod
    def load(cls, folder: Path) -> Ledger | None:
        """None where the folder has none, or a torn one.

        Raises:
            RunFolderError: a newer version wrote it.
        """
        try:
            raw = json.loads((folder / NAME).read_text())
            if raw["format"] > _FORMAT:
                raise RunFolderError(
                    f"{folder / NAME} has format {raw['format']}, this version reads {_FORMAT}: a newer "
                    "rayapp wrote it. Use that version."
                )
            files = {str(key): (int(size), int(time)) for key, (size, time) in raw["files"].items()}
            return cls(folder=folder, uri=raw["uri"], generation=int(raw["generation"]), files=files)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
