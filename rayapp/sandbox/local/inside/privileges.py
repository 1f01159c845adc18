"""Leaves root: a zygote that root starts first becomes an unprivileged user of its own.

In a user namespace made by root, root keeps its rights on files that root owns, such as `/proc/sys`, and RLIMIT_NPROC
does not apply. So candidate code never runs with an id that is 0 outside its user namespace.
"""

# Paths in this module are strings for mount(), so it uses os and not pathlib.
# ruff: noqa: PTH112, PTH116
from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

from rayapp.sandbox.local.levels import kernel

# User ids above those of distributions, containers and subuid ranges.
_HIGH_UIDS = range(2_000_000_000, 2_000_000_000 + (1 << 24))
_LOW_UIDS = range(20_000, 60_000)
# User ids for files of images that root unpacks; the second where this user namespace lacks the first.
_IMAGES_UIDS = 1_999_999_999, 60_001


def images_uid() -> int:
    """Return the user id that owns the files of images, under which sandboxes on images run."""
    if os.geteuid() != 0:
        return os.getuid()
    return _IMAGES_UIDS[0] if _maps(range(_IMAGES_UIDS[0], _IMAGES_UIDS[0] + 1)) else _IMAGES_UIDS[1]


def choose_uid() -> int:
    """Return a random unprivileged user id for one zygote: two on this node must not share one, and there is no
    registry."""
    return random.SystemRandom().choice(_HIGH_UIDS if _maps(_HIGH_UIDS) else _LOW_UIDS)


def _maps(uids: range) -> bool:
    mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(int(first) <= uids.start and uids.stop <= int(first) + int(size) for first, _, size in mapped)


def leave_root(paths: Sequence[str], uid: int | None = None) -> None:
    """If this process runs as root, become the user `uid` (None: chosen), that can still read `paths`. An OSError says
    that the node forbids the mounts for it."""
    with contextlib.suppress(OSError):
        # When memory runs out, the kernel should kill a sandbox, not the trainer.
        Path("/proc/self/oom_score_adj").write_text("1000")
    if os.geteuid() != 0:
        return
    uid = choose_uid() if uid is None else uid
    _expose([path for path in paths if _blocking_parent(path)])
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # After the change of user, root would own /proc/self. This process must own it to write the user namespace's maps.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _blocking_parent(path: str) -> str | None:
    parents = [str(parent) for parent in reversed(Path(path).parents)]
    return next((parent for parent in parents if not os.stat(parent).st_mode & 0o001), None)


def _expose(paths: Sequence[str]) -> None:
    """Mount an empty folder over the directory that only root may enter, and mount the paths inside it."""
    if not paths:
        return
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except OSError as error:
        message = f"only root can read {paths[0]}: install Python where every user can, e.g. in /opt or /usr/local"
        raise OSError(error.errno, message) from error
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    opened = {path: os.open(path, os.O_PATH) for path in paths}
    for parent in sorted({str(_blocking_parent(path)) for path in paths}):
        kernel.mount("tmpfs", parent, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    for path, descriptor in opened.items():
        make_mount_point(path, is_dir=os.path.isdir(f"/proc/self/fd/{descriptor}"))
        kernel.mount(f"/proc/self/fd/{descriptor}", path, "", kernel.MS_BIND | kernel.MS_REC)
        os.close(descriptor)


def make_mount_point(path: str, *, is_dir: bool) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if is_dir:
        Path(path).mkdir(exist_ok=True)
    else:
        Path(path).touch()
