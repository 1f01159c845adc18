"""Runs umoci on a hostile image and finishes the tree that it made, in a child process that can write to one folder.

    job {"argv": …}                     leave root, limit, confine, then become umoci
    job {"user": …, "search_path": …}   leave root, limit, confine, then finish the tree `rootfs` and describe it

A child that root starts first becomes the images' user, who owns all files. In a container root could read and write
every file, so each file's owner gets these rights; set-id bits are dropped. Paths of the image are resolved by the
kernel as if the tree were the root of the file system (openat2 with RESOLVE_IN_ROOT).
"""

# Paths in this module are relative to folder descriptors, which pathlib can't use.
# ruff: noqa: PTH115, PTH120
from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterator
from typing import Any

from rayapp.sandbox.images import MOUNT_POINTS
from rayapp.sandbox.local.inside.privileges import leave_root
from rayapp.sandbox.local.levels import kernel, landlock, seccomp

_CHUNK = 1 << 20
_RESOLVE_IN_ROOT, _RESOLVE_NO_MAGICLINKS = 0x10, 0x02
_PYTHON = "python3"


class BadImageError(Exception):
    pass


def finish(root: int) -> int:
    """Give owners their rights, drop set-id bits, and make the mount points; return the tree's bytes on the disk."""
    for name in MOUNT_POINTS:
        _make_mount_point(root, name)
    num_bytes, seen = 512 * os.fstat(root).st_blocks, set()
    for _, folders, files, folder in os.fwalk(".", topdown=True, dir_fd=root):
        for name in (*folders, *files):
            facts = os.lstat(name, dir_fd=folder)
            if stat.S_ISLNK(facts.st_mode) or (facts.st_nlink > 1 and facts.st_ino in seen):
                continue
            seen |= {facts.st_ino} if facts.st_nlink > 1 and not stat.S_ISDIR(facts.st_mode) else set()
            num_bytes += 512 * facts.st_blocks
            is_folder = stat.S_ISDIR(facts.st_mode)
            wanted = facts.st_mode & (0o1777 if is_folder else 0o777) | (0o700 if is_folder else 0o600)
            if stat.S_IMODE(facts.st_mode) != wanted:
                os.chmod(name, wanted, dir_fd=folder)
    return num_bytes


def open_in(root: int, path: str, flags: int) -> int:
    """Open a path as if the folder `root` were `/`: symbolic links can't lead out of it. Raises OSError."""
    how = struct.pack("<QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    return kernel.syscall(
        seccomp.number("openat2"),
        ctypes.c_int(root),
        os.fsencode(path or "."),
        how,
        ctypes.c_size_t(len(how)),
        name="openat2",
    )


def _make_mount_point(root: int, name: str) -> None:
    """Make `name` a folder: a mount would follow a symbolic link out of the tree."""
    try:
        if stat.S_ISDIR(os.lstat(name, dir_fd=root).st_mode):
            return
        os.unlink(name, dir_fd=root)
    except FileNotFoundError:
        pass
    os.mkdir(name, 0o1777 if name == "tmp" else 0o755, dir_fd=root)


def user_of(root: int, user: str) -> tuple[int, int, str]:
    """Return user id, group id and home of a USER `name`, `id`, `name:group` or `id:group`. Raises BadImageError."""
    name, _, group = (user or "0").partition(":")
    uid, gid, home = (int(name), 0, "/") if name.isdecimal() else (-1, 0, "/")
    for fields in _records(root, "etc/passwd", 7):
        if fields[0] == name or (uid >= 0 and fields[2] == str(uid)):
            uid, gid, home = int(fields[2]), int(fields[3]), fields[5] or "/"
            break
    if group:
        own = [fields[2] for fields in _records(root, "etc/group", 3) if fields[0] == group]
        gid = int(group) if group.isdecimal() else int(own[0]) if own else -1
    if min(uid, gid) < 0:
        raise BadImageError(f"its USER {user[:80]!r} is not in its /etc/passwd or /etc/group")
    if max(uid, gid) >= 1 << 31:
        raise BadImageError(f"its USER {user[:80]!r} has an id of 2^31 or more")
    return uid, gid, home


def _records(root: int, path: str, num_fields: int) -> Iterator[list[str]]:
    try:
        descriptor = open_in(root, path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return
        for line in file.read(_CHUNK).decode(errors="replace").splitlines():
            fields = line.split(":")
            if len(fields) >= num_fields and fields[2].isdecimal() and (num_fields < 7 or fields[3].isdecimal()):
                yield fields


def python_in(root: int, search_path: str) -> str:
    """Return the image's python3; empty if there is none that is usable."""
    for folder in search_path.split(":"):
        path = f"{folder.rstrip('/')}/{_PYTHON}"
        try:
            descriptor = open_in(root, path, os.O_PATH)
        except OSError:
            continue
        mode, file = os.fstat(descriptor).st_mode, os.readlink(f"/proc/self/fd/{descriptor}")
        os.close(descriptor)
        if stat.S_ISREG(mode) and mode & 0o111:
            return path if _is_usable(root, file) else ""
    return ""


def _is_usable(root: int, file: str) -> bool:
    """Return whether a Python is at least 3.9 and has its whole standard library, unlike Debian's python3-minimal."""
    version = file.rpartition("/")[2]
    minor = version.removeprefix(f"{_PYTHON}.")
    if not minor.isdecimal():
        return True
    prefix = os.path.dirname(os.path.dirname(file))[len(os.readlink(f"/proc/self/fd/{root}")) :]
    try:
        os.close(open_in(root, f"{prefix}/lib/{version}/json", os.O_PATH))
    except OSError:
        return False
    return int(minor) >= 9


def main() -> None:
    """Read a job from standard input, do it, and print its result, in the child process."""
    job = json.loads(sys.stdin.readline())
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0o022)
    leave_root([job["folder"], *job["readable"]], job["uid"])
    os.chdir(job["folder"])
    for what, value in ((resource.RLIMIT_FSIZE, job["max_bytes"]), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_s"], job["cpu_s"]))
    _confine(job["folder"])
    if argv := job.get("argv"):
        os.execv(argv[0], argv)
    try:
        found = _described(os.open("rootfs", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), job)
    except BadImageError as error:
        found = {"problem": str(error)}
    json.dump(found, sys.stdout)


def _described(root: int, job: dict[str, Any]) -> dict[str, object]:
    num_bytes = finish(root)
    uid, gid, home = user_of(root, job["user"])
    python = python_in(root, job["search_path"])
    return {"num_bytes": num_bytes, "uid": uid, "gid": gid, "home": home, "python": python}


def _confine(folder: str) -> None:
    if landlock.abi() < 1:
        return
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    ruleset = landlock.create_ruleset()
    landlock.allow(ruleset, "/", landlock.READ_ONLY)
    landlock.allow(ruleset, "/dev/null", landlock.DEVICE)
    landlock.allow(ruleset, folder, landlock.read_write())
    kernel.take([landlock.restriction(ruleset)])
