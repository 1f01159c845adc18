"""OpenStack Swift in a Python environment of its own: its pins conflict with ours. Made once, then reused.

It lies inside the running interpreter's environment, and is deleted with it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "2.38.3"
_REQUIREMENTS = (f"swift=={VERSION}", "setuptools<81")
"""Swift finds its middleware through pkg_resources, which setuptools 81 no longer has."""
_TIMEOUT_S = 600.0


class SwiftNotInstalledError(Exception):
    """The environment can't be made; the message says why."""


def swift_environment() -> Path:
    """Return the environment's folder of programs.

    Raises:
        SwiftNotInstalledError: there is neither uv nor pip, or the packages can't be installed.
    """
    home = Path(sys.prefix) / "rayapp-servers" / f"swift-{VERSION}"
    programs, whole = home / "bin", home / ".whole"
    if whole.exists():
        return programs
    shutil.rmtree(home, ignore_errors=True)
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.prefix) / "bin"))
    if uv is not None:
        _run([uv, "venv", "--python", sys.executable, str(home)])
        _run([uv, "pip", "install", "--python", str(programs / "python"), *_REQUIREMENTS])
    else:
        _run([sys.executable, "-m", "venv", str(home)])
        _run([str(programs / "python"), "-m", "pip", "install", "--quiet", *_REQUIREMENTS])
    whole.touch()
    return programs


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SwiftNotInstalledError(f"{' '.join(command[:3])}: {error}") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise SwiftNotInstalledError(f"{' '.join(command[:3])} failed: {reason}")
