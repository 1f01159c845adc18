"""Make or update the environment `.venv` from the locks in this folder, for `make venv`; standard library only.

A second call does nothing: a stamp in the environment holds the hash of everything that determines its contents. It
uses uv where there is one (on PATH, or installed into the environment first) and pip otherwise. Locks are installed
with --no-deps: they are complete, and pip's resolver would take minutes to confirm it.

Usage: python install.py [--device cpu|gpu] [--installer auto|uv|pip] [--bytecode now|later] [--venv .venv]
           [--lock-only]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--installer", choices=("auto", "uv", "pip"), default="auto")
    parser.add_argument("--bytecode", choices=("now", "later"), default="now")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--lock-only", action="store_true", help="without this project and without tools of developers")
    options = parser.parse_args()
    if not (3, 11) <= sys.version_info[:2] < (3, 13):
        print(f"Python 3.11 or 3.12 is needed, this is {sys.version.split()[0]} ({sys.executable})", file=sys.stderr)
        return 2
    wanted, stamp = _fingerprint(options.device), options.venv / ".rayapp-installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return 0
    return _install(options, stamp, wanted)


def _install(options: argparse.Namespace, stamp: Path, wanted: str) -> int:
    stamp.unlink(missing_ok=True)
    python = options.venv / "bin" / "python"
    if not python.exists():
        print(f"creating {options.venv} with Python {sys.version.split()[0]}", flush=True)
        venv.EnvBuilder(with_pip=True).create(options.venv)
    uv = _find_uv(python, options.installer)
    if options.installer == "uv" and uv is None:
        print("uv is not on PATH and could not be installed; use --installer pip", file=sys.stderr)
        return 1
    install = _uv_command(uv, python, options.device) if uv else [str(python), "-m", "pip", "install"]
    install += _bytecode_options(options.bytecode, uses_uv=uv is not None)
    print(f"installing {_lock(options.device).name} with {'uv' if uv else 'pip'}", flush=True)
    locked = [*install, "--no-deps", "-r", str(_lock(options.device))]
    steps = [
        [*locked, "-r", str(HERE / "requirements-dev.lock")],
        # The build backend is in the lock, so nothing is fetched to build this package.
        [*install, "--no-deps", "--no-build-isolation", "-e", str(ROOT)],
    ]
    for step in [locked] if options.lock_only else steps:
        if subprocess.run(step, stdin=subprocess.DEVNULL, check=False).returncode:
            print(_cure(options.device, uses_uv=uv is not None), file=sys.stderr)
            return 1
    if options.device == "cpu":
        _make_torchvision_importable(python)
    if not options.lock_only:
        stamp.write_text(wanted)
    return 0


_DECLARED = """

# Added by rayapp's install.py: this build's operators need CUDA. Declare those that torchvision's files describe, so
# that its transforms can be imported. Calls of the operators still fail.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def _make_torchvision_importable(python: Path) -> None:
    """Let torchvision's transforms, which processors of pictures use, be imported where only PyPI's build could be
    installed: beside a torch for CPUs its operators can't be loaded, and its import fails."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)

    if "torchvision::nms does not exist" not in run("import torchvision").stderr:
        return
    package = run("import importlib.util; print(importlib.util.find_spec('torchvision').origin)").stdout.strip()
    with Path(package).with_name("extension.py").open("a") as file:
        file.write(_DECLARED)


def _lock(device: str) -> Path:
    return HERE / f"requirements-{device}.lock"


def _fingerprint(device: str) -> str:
    """Return a hash of all that an installation depends on: locks, project metadata, interpreter, place of the
    project."""
    digest = hashlib.sha256(f"{device}\n{sys.version}\n{ROOT}\n".encode())
    for file in (_lock(device), HERE / "requirements-dev.lock", ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _find_uv(python: Path, installer: str) -> str | None:
    """Return uv's path. If it is missing, pip tries to install it into the environment first."""
    if installer == "pip":
        return None
    own = python.with_name("uv")
    if found := shutil.which("uv") or (str(own) if own.exists() else None):
        return found
    command = [str(python), "-m", "pip", "install", "--quiet", "uv"]
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        return None
    return str(own)


def _bytecode_options(when: str, *, uses_uv: bool) -> list[str]:
    """Return options so that both installers compile all 39,000 files now, two minutes of a core, or none.

    Files not compiled now are compiled at their first import, which only a fifth of them ever have. But where
    PYTHONDONTWRITEBYTECODE is set (in many images) nothing is saved, and each process of a run would compile PyTorch
    and vLLM again. The Makefile empties the variable.
    """
    if uses_uv:
        return ["--compile-bytecode"] if when == "now" else []
    return [] if when == "now" else ["--no-compile"]


def _uv_command(uv: str, python: Path, device: str) -> list[str]:
    command = [uv, "pip", "install", "--python", str(python)]
    # uv ignores pip's settings. A folder of wheels that pip is configured with may be the only place with a CPU torch.
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    for link in links:
        command += ["--find-links", link]
    if device == "cpu" and not links:
        command += ["--torch-backend", "cpu"]
    return command


def _cure(device: str, *, uses_uv: bool) -> str:
    lines = ["", "The installation failed; the message above says on which package."]
    if device == "cpu" and not uses_uv and not os.environ.get("PIP_FIND_LINKS"):
        lines += [
            "If it is torch: its CPU build is not on PyPI. Either install uv and run this again (it knows PyTorch's",
            "own index), or name that index as extra-index-url in your pip configuration, or put the wheel into a",
            "folder and set PIP_FIND_LINKS to it.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
