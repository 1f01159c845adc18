"""Copies a Python that only root can read, often in root's home (pyenv, uv), where the sandboxes' users can read it.

    /var/cache/rayapp/python-<hash>/bin/python3.12    the interpreter; beside it its libraries and packages

The hash covers names, sizes and times of the originals, so an updated Python gets another copy. A copy is renamed when
it is complete.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rayapp.core.errors import SandboxConfigError

CODE_PATH = str(Path(__file__).resolve().parents[3])
FOLDERS = Path("/var/cache/rayapp"), Path("/tmp")  # the first one that is writable
# Parts that candidate code never sees or needs.
_LEFT_OUT = shutil.ignore_patterns("site-packages", "dist-packages", "test", "config-*")
_LOOK = """
import json, sys
sys.path.insert(0, {code_path!r})
from rayapp.sandbox.local.inside.boot import import_packages
from rayapp.sandbox.local.levels.visible_files import of_this_interpreter
sys.path.remove({code_path!r})
view = of_this_interpreter(import_packages({packages!r}, {paths!r}))
json.dump([view.library, view.shared, view.packages], sys.stdout)
"""
_LOOK_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Python:
    executable: str
    paths: tuple[str, ...]  # folders and files of the packages to preload
    environment: Mapping[str, str] = field(default_factory=dict)  # needed to start


def readable_python(packages: tuple[str, ...], paths: tuple[str, ...]) -> Python:
    """Return this interpreter, or a copy of it if this process runs as root and other users can't read the original."""
    library = str(Path(os.__file__).parent)
    if os.geteuid() != 0 or all(map(_is_readable, (library, *paths))):
        return Python(executable=sys.executable, paths=paths)
    return _copied(packages, paths)


def _is_readable(path: str) -> bool:
    wanted = 0o005 if Path(path).is_dir() else 0o004
    return Path(path).stat().st_mode & wanted == wanted and all(
        parent.stat().st_mode & 0o001 for parent in Path(path).parents
    )


@functools.cache
def _copied(packages: tuple[str, ...], paths: tuple[str, ...]) -> Python:
    library, shared, found = _look(packages, paths)
    executable = os.path.realpath(sys.executable)
    home = staged(
        {f"bin/{Path(executable).name}": executable, f"lib/{Path(library).name}": library}
        | {f"lib/{Path(path).name}": path for path in shared}
    )
    beside = {Path(path).name: path for path in found}
    place = staged(beside) if beside else home
    return Python(
        executable=str(home / "bin" / Path(executable).name),
        paths=tuple(str(place / name) for name in beside),
        environment={"LD_LIBRARY_PATH": str(home / "lib")},
    )


def _look(packages: Sequence[str], paths: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the library, shared libraries and packages that a zygote of the original Python would show to code."""
    program = _LOOK.format(code_path=CODE_PATH, packages=packages, paths=paths)
    argv = [sys.executable, "-s", "-P", "-S", "-X", "utf8", "-c", program]
    done = subprocess.run(argv, env={}, capture_output=True, text=True, timeout=_LOOK_TIMEOUT_S, check=False)
    if done.returncode:
        raise SandboxConfigError(
            f"the sandbox's packages ({', '.join(packages) or 'none'}) can't be imported: {done.stderr.strip()[-500:]}"
        )
    library, shared, found = json.loads(done.stdout)
    return library, shared, found


def staged(originals: Mapping[str, str]) -> Path:
    """Return a folder with copies (name -> original); make it if it is missing."""
    place = _place(_hash_of(originals))
    if not _is_made(place):
        _make(place, originals)
    return place


def _hash_of(originals: Mapping[str, str]) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for name, path in sorted(originals.items()):
        digest.update(f"{name}\0{path}\n".encode())
        for file in sorted(_files_of(path)):
            facts = file.stat()
            digest.update(f"{file}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _files_of(path: str) -> Iterator[Path]:
    """Yield the files to copy, without cached bytecode, which changes whenever a module is imported."""
    if not Path(path).is_dir():
        yield Path(path)
    for folder, names, files in os.walk(path):
        left_out = {"__pycache__", *_LEFT_OUT(folder, names)}
        names[:] = [name for name in names if name not in left_out]
        yield from (file for file in (Path(folder, name) for name in files) if file.exists())


def _place(name: str) -> Path:
    for folder in FOLDERS:
        try:
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        except FileExistsError:
            pass  # an earlier start, or another process that starts now, has made the copy
        except OSError:
            continue
        if os.access(folder, os.W_OK) and _is_readable(str(folder)):
            return folder / f"python-{name}"
    raise SandboxConfigError(
        f"sandboxes can't use this Python ({sys.base_prefix}): only root can read it, and a copy can be written "
        f"neither to {' nor to '.join(map(str, FOLDERS))}. Make one of these folders writable, or install Python where "
        "every user can read it, e.g. in /opt"
    )


def _is_made(place: Path) -> bool:
    try:
        facts = place.lstat()
    except FileNotFoundError:
        return False
    if facts.st_uid != os.geteuid() or not stat.S_ISDIR(facts.st_mode) or facts.st_mode & 0o022:
        raise SandboxConfigError(
            f"{place} is not safe to use: it is not a folder, belongs to another user, or others may write to it. "
            "Remove it"
        )
    return True


def _make(place: Path, originals: Mapping[str, str]) -> None:
    making = Path(tempfile.mkdtemp(prefix=f"{place.name}.", dir=place.parent))
    try:
        for name, path in originals.items():
            (making / name).parent.mkdir(exist_ok=True)
            if Path(path).is_dir():
                shutil.copytree(path, making / name, ignore=_LEFT_OUT, ignore_dangling_symlinks=True)
            else:
                shutil.copy2(path, making / name)
        _open_to_all(making)
        os.sync()  # sync before renaming: after a power loss, a copy under its final name must be complete
        making.rename(place)
    except OSError as error:
        if not _is_made(place):  # if a copy exists now, another process was faster
            raise SandboxConfigError(f"Python can't be copied to {place} for the sandboxes: {error}") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _open_to_all(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        Path(parent).chmod(0o755)
        for file in (Path(parent, name) for name in files):
            file.chmod(0o755 if file.stat().st_mode & 0o100 else 0o644)
