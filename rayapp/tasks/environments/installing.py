"""A virtual environment for packages that don't fit into ours, made once for each list of them and kept.

~/.cache/rayapp/environments/<digest of the list and of this Python>/bin/python        $RAYAPP_ENVIRONMENTS_DIR
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from rayapp.core.errors import InputError

_SHOWN_CHARS = 800
"""Of what the installer says when it fails."""


def python_with(packages: Sequence[str]) -> Path:
    """An interpreter that has these packages, by pip's own words for them. The first call installs, for a minute or so.

    Raises:
        InputError: they can't be installed.
    """
    digest = hashlib.sha256(json.dumps([sorted(packages), sys.version, sys.prefix]).encode()).hexdigest()[:16]
    folder = _root() / digest
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists():
        return python
    folder.mkdir(parents=True, exist_ok=True)
    # Several rollout workers of a machine come here at once. Beside the folder: uv has a lock of its own in it.
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            _install(folder, python, packages)
            stamp.write_text("\n".join(packages))
    return python


def home() -> Path:
    """A home for their programs, which keep there what they downloaded."""
    folder = _root() / "home"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _root() -> Path:
    return Path(os.environ.get("RAYAPP_ENVIRONMENTS_DIR") or "~/.cache/rayapp/environments").expanduser()


def _install(folder: Path, python: Path, packages: Sequence[str]) -> None:
    uv = shutil.which("uv")
    venv.EnvBuilder(with_pip=uv is None, clear=False).create(folder)
    command = [uv, "pip", "install", "--python", str(python)] if uv else [str(python), "-m", "pip", "install"]
    done = subprocess.run(
        [*command, "-q", *packages], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InputError(
            f"the packages {', '.join(packages)} can't be installed into {folder}: "
            f"{' '.join(done.stderr.split())[-_SHOWN_CHARS:]}. Mend `packages`, or install them yourself and name that "
            "interpreter as `python`"
        )
