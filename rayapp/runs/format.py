"""Which layout a run folder has: `format.json`. A program that is older than it says so, and changes nothing.

Used by whoever opens a run folder, to write or to look. Folders of before this file are format 1.
"""

from __future__ import annotations

import json
from pathlib import Path

from rayapp.core.errors import RunFolderError
from rayapp.core.files import write_text
from rayapp.core.version import __version__

FORMAT_FILE = "format.json"
FORMAT = 1


def check_format(folder: Path) -> None:
    """Raises RunFolderError: a newer version wrote the folder."""
    file = folder / FORMAT_FILE
    if file.exists():
        check_format_text(file.read_bytes(), str(folder))


def check_format_text(text: bytes, where: str) -> None:
    """Raises RunFolderError: what `format.json` of the run at `where` holds is of a newer version, or nonsense."""
    try:
        raw = json.loads(text)
        found, writer = int(raw["format"]), str(raw.get("written_by", "another version"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{where}/{FORMAT_FILE} can't be read ({error!r}): the folder is damaged, or no run"
        ) from None
    if found > FORMAT:
        raise RunFolderError(
            f"{where} was written by a newer version ({writer}, format {found}); this one reads format {FORMAT}. "
            "Nothing was changed: use that version."
        )


def write_format(folder: Path) -> None:
    """Mark the folder as ours."""
    text = json.dumps({"format": FORMAT, "written_by": f"rayapp {__version__}"})
    file = folder / FORMAT_FILE
    if not file.exists() or file.read_text() != text:
        write_text(file, text)
