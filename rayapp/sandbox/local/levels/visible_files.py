"""The file system as candidate code sees it: Python's library, the system's programs, a few devices.

    /usr, /bin, /lib…   the system's programs and libraries, read-only
    <library>           Python's standard library, without site-packages (which may hold this project's own tasks)
    <packages>          the extra packages of a spec, one folder each, read-only
    /dev                null, zero, full, random, urandom
    /tmp                private, in memory, with a quota; the only writable folder. If Python or a package is below
                        the machine's /tmp, it is also shown there, read-only
    /app, /tests…       links to folders in /tmp that code may make; scripts of Harbor tasks use these paths

Nothing of the machine's /home, /root, /etc, /var, /run, /proc or /sys is shown.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICES = ("null", "zero", "full", "random", "urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
HARBOR = ".harbor"  # folder, inside a sandbox's own, into which the links /app, /tests, /solution and /logs point
LINKS = {f"/{name}": f"/tmp/{HARBOR}/{name}" for name in ("app", "tests", "solution", "logs")}
LIBRARY_IN_IMAGES = "/dev/.python"  # of the zygote's own standard library, because an image may have no Python
_MOUNT_POINTS = ("/mnt", "/media", "/srv", "/opt", "/sys")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    library: str  # e.g. /usr/local/lib/python3.11
    shared: tuple[str, ...]  # outside library and system, e.g. libpython3.11.so
    packages: tuple[str, ...]  # folders and files of extra packages

    def extra(self) -> tuple[str, ...]:
        """Paths shown in addition to the system's folders."""
        return (self.library, *self.shared, *self.packages)

    def sources(self) -> tuple[str, ...]:
        return (*SYSTEM, *self.extra())


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageView:
    """The images that sandboxes of one zygote can have as their root folder."""

    trees: str
    uid: int  # inside the sandbox, of all files of an image
    gid: int


def of_this_interpreter(packages: Sequence[str]) -> View:
    library = sysconfig.get_path("stdlib")
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in maps if line.count("/")}
    outside = sorted(
        path
        for path in mapped
        if ".so" in path and not path.startswith((f"{library}/", *(f"{top}/" for top in SYSTEM), *packages))
    )
    return View(library=library, shared=tuple(outside), packages=tuple(packages))


def spare_mount_point(used: tuple[str, ...]) -> str:
    """Return an existing folder that can be a mount point, because no needed file is in it."""
    for folder in _MOUNT_POINTS:
        if Path(folder).is_dir() and not any(path == folder or path.startswith(f"{folder}/") for path in used):
            return folder
    raise OSError(
        f"a sandbox's root folder has no mount point: each of {', '.join(_MOUNT_POINTS)} is missing, or holds files "
        "that sandboxes need, such as Python's library. Create an empty folder with one of these names"
    )
