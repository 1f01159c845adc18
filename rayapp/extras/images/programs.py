"""Runs skopeo and umoci, and limits what they write: bytes as they lie on the disk, files, and time."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayapp.core.errors import ImageError, SandboxUnavailableError, one_line
from rayapp.extras.images.store import Store
from rayapp.sandbox.images import Reference
from rayapp.sandbox.local.inside.privileges import images_uid

CODE_PATH = str(Path(__file__).resolve().parents[3])
_PROGRAM = "import sys; sys.path.insert(0, {path!r}); from rayapp.extras.images.tree import main; main()"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
MAX_FILES = 1_000_000
_TIMEOUT_S, _CPU_S = 3600.0, 1800
_GONE = re.compile(r"manifest unknown|not found|404|no such file|does not exist|name unknown", re.IGNORECASE)
_REFUSED = re.compile(r"unauthorized|authentication required|denied|forbidden|\b40[13]\b", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"connection re|dial tcp|timeout|timed out|no such host|EOF|too many requests|\b(429|50[0-4])\b|ended by",
    re.IGNORECASE,
)


def this_platform() -> str:
    """Return this machine's platform in OCI's form, e.g. linux/amd64."""
    return f"linux/{_ARCHITECTURES.get(platform.machine(), platform.machine())}"


def too_large(store: Store, what: str, why: str) -> str:
    return (
        f"{what} does not fit into the cache {store.folder} of {store.max_bytes / (1 << 30):g} GiB: {why}. Raise "
        "sandbox.providers[].image_cache_gib"
    )


@dataclass(frozen=True, slots=True)
class Watch:
    """Limits of a program that writes into a folder: bytes as they lie on the disk, files and time."""

    store: Store
    folder: Path
    what: str

    def wait(self, child: subprocess.Popen[bytes]) -> None:
        """Wait for the program. Raises ImageError: it exceeded a limit, and was ended."""
        until, pause_s = time.monotonic() + _TIMEOUT_S, 0.05
        while True:
            try:
                child.wait(pause_s)
                problem = self._problem()
            except subprocess.TimeoutExpired:
                started = time.monotonic()
                late = f"{self.what} is refused: it took more than {_TIMEOUT_S:g} s"
                problem = self._problem() if started < until else late
                # Looking takes at most a fifth of the time.
                pause_s = max(0.2, 5 * (time.monotonic() - started))
            if problem or child.returncode is not None:
                child.kill()
                child.wait()
                if problem:
                    raise ImageError(problem)
                return

    def _problem(self) -> str:
        num_bytes, num_files = usage(self.folder)
        if num_bytes > self.store.max_bytes:
            return too_large(self.store, self.what, f"it has more than {num_bytes} bytes")
        return f"{self.what} is refused: it has more than {MAX_FILES} files" if num_files > MAX_FILES else ""


def usage(folder: Path) -> tuple[int, int]:
    """Return the bytes on the disk, and the number of files, below a folder that changes meanwhile."""
    num_bytes = num_files = 0
    for above, _, names in os.walk(folder):
        num_files += 1
        for name in names:
            num_files += 1
            try:
                num_bytes += 512 * os.lstat(f"{above}/{name}").st_blocks
            except OSError:
                continue
    return num_bytes, num_files


def program(name: str, what: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ImageError(
            f"{what} needs the programs skopeo and umoci, but {name} is not installed: apt-get install skopeo umoci "
            "(docs/sandboxes.md#images)"
        )
    return os.path.realpath(found)


def skopeo(
    command: str,
    reference: Reference,
    arguments: Sequence[str],
    *,
    watched: Watch | None = None,
) -> bytes:
    """Run skopeo, and return its output. Raises ImageError, and SandboxUnavailableError (the registry)."""
    what = f"image {reference}"
    system, _, machine = this_platform().partition("/")
    login = Path(os.environ.get("DOCKER_CONFIG", ""), "config.json") if os.environ.get("DOCKER_CONFIG") else None
    argv = [
        *(program("skopeo", what), "--insecure-policy", f"--override-os={system}", f"--override-arch={machine}"),
        *(command, *([f"--authfile={login}"] if login is not None and login.is_file() else []), *arguments),
    ]
    with tempfile.TemporaryFile() as errors:
        limit = watched.store.max_bytes if watched is not None else 1 << 30
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if watched is not None else subprocess.PIPE,
            stderr=errors,
            env=os.environ | ({"TMPDIR": str(watched.folder)} if watched is not None else {}),
        )
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (limit, limit))
        try:
            if watched is not None:
                watched.wait(child)
                said = b""
            else:
                said, _ = child.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise SandboxUnavailableError(f"{what} can't be fetched: no answer within {_TIMEOUT_S:g} s") from None
        finally:
            child.kill()
            child.wait()
        errors.seek(0)
        told = errors.read(1 << 20).decode(errors="replace").strip().rpartition("\n")[2]
    if child.returncode == 0:
        return said
    message = re.sub(r'.*? msg="?(.*?)"?$', r"\1", told)[-400:] or f"ended by status {child.returncode}"
    host = reference.registry or reference.name
    if reference.kind == "registry" and _REFUSED.search(message) and not _GONE.search(message):
        raise ImageError(
            f"{what}: {host} refused access. Check the name, or log in with `docker login` (or write "
            "~/.docker/config.json)"
        )
    if reference.kind == "registry" and _GONE.search(message):
        raise ImageError(f"{what} is not in {host}: check its name: {one_line(message)}")
    if reference.kind == "registry" and _UNREACHABLE.search(message):
        raise SandboxUnavailableError(f"{what} can't be fetched from {host}: {one_line(message)}")
    raise ImageError(f"{what} can't be read: {one_line(message)}")


def in_child(store: Store, folder: Path, what: str, job: Mapping[str, object]) -> str:
    """Run a job of `tree.py`, and return what it printed. Raises ImageError."""
    facts = {
        "folder": str(folder),
        "readable": [CODE_PATH, sys.prefix, sys.base_prefix],
        "uid": images_uid(),
        "max_bytes": store.max_bytes,
        "cpu_s": _CPU_S,
    }
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        given.write(f"{json.dumps({**facts, **job})}\n".encode())
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=CODE_PATH)],
            stdin=given,
            stdout=said,
            stderr=errors,
            env={"PATH": os.defpath, **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}},
        )
        try:
            Watch(store, folder, what).wait(child)
        finally:
            child.kill()
            child.wait()
        for file in (said, errors):
            file.seek(0)
        if child.returncode:
            last = errors.read(1 << 20).decode(errors="replace").strip().rpartition("\n")[2][-300:]
            raise ImageError(f"{what} can't be unpacked: exit status {child.returncode}: {one_line(last)}")
        return said.read(1 << 20).decode()
