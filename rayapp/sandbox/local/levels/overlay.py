"""An image as the root of executions: an overlay of its read-only tree and a tmpfs for all that code writes.

FOLDER/        tmpfs: the writable part, with the size of the sandbox's disk
FOLDER/root    the overlay; /dev and /dev/shm are mounted in it, and each execution mounts its own /proc
"""

# Paths in this module are strings for mount(), so it uses os and not pathlib.
# ruff: noqa: PTH102
from __future__ import annotations

import ctypes
import os

from rayapp.sandbox.local.levels import kernel, landlock, loopback, rules, seccomp
from rayapp.sandbox.local.levels.level import Place
from rayapp.sandbox.local.levels.limits import MIB

_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOATIME
_PROC_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC | kernel.MS_RDONLY
_LEAST_FILES, _FILES_PER_MIB = 1024, 16
_WRITTEN = ("up", "shm")  # hold everything that executions write
_filter = bytearray(rules.closing(is_of_image=True))


class ImageMount:
    """A mount point with at most one mounted image. A sandbox has two: for its files, and for function calls."""

    def __init__(self, folder: str, trees: int, *, has_loopback: bool) -> None:
        # `trees`: descriptor of the folder that holds the trees of all images.
        self._folder = folder
        self._root = f"{folder}/root"
        self._trees = trees
        self._has_loopback = has_loopback
        self._mounted = ("", 0)  # name of the mounted tree, and MiB of the writable part
        self._is_stale = True
        self._untouched = b""
        self._inodes = kernel.InodeCounter(folder)
        self._ruleset = -1
        self._seen = [ctypes.create_string_buffer(kernel.STATX_BYTES) for _ in _WRITTEN]
        seen = zip(_WRITTEN, self._seen, strict=True)
        self._look = [kernel.statx_step(f"{folder}/{path}", buffer) for path, buffer in seen]
        self.steps: list[kernel.Step] = []  # with which a child confines itself after `enter`

    def forget(self) -> None:
        """Make the next `prepare` mount the image again, even if nothing was written."""
        self._is_stale = True

    def prepare(self, place: Place) -> None:
        """Mount the image of this place, unless it is already mounted and nothing was written to it."""
        if self._is_stale or self._mounted != (place.image, place.disk_mib):
            self._renew(place)

    def is_untouched(self) -> bool:
        self._is_stale |= self._inodes.has_moved() or self._untouched != self._facts()
        return not self._is_stale

    def enter(self, *, with_proc: bool) -> None:
        """Make the image the root folder of this child process; with `with_proc`, mount a new /proc in it."""
        if with_proc:
            kernel.unshare(kernel.CLONE_NEWNS)
            # Mount /proc read-only, because Landlock lets code write to all of the image.
            kernel.mount("proc", f"{self._root}/proc", "proc", _PROC_FLAGS, "subset=pid")
        os.chroot(self._root)
        os.chdir("/")

    def _renew(self, place: Place) -> None:
        if self._mounted[0]:
            kernel.umount(self._folder, kernel.MNT_DETACH)
            os.close(self._ruleset)
        self._mounted = ("", 0)
        files = max(_LEAST_FILES, _FILES_PER_MIB * place.disk_mib)
        size = f"size={place.disk_mib * MIB},nr_inodes={files},mode=755"
        kernel.mount("tmpfs", self._folder, "tmpfs", _FLAGS, size)
        self._mounted = (place.image, place.disk_mib)
        self._mount_root(place.image)
        self._ruleset = landlock.create_ruleset()
        landlock.allow(self._ruleset, self._root, landlock.read_write())
        if self._has_loopback:
            landlock.allow_port(self._ruleset, loopback.PORT)
        closing = seccomp.installation(_filter)
        self.steps = [landlock.restriction(self._ruleset), kernel.CLEAR_CAPABILITIES, closing]
        self._inodes.begin()
        self._is_stale, self._untouched = False, self._facts()

    def _mount_root(self, tree: str) -> None:
        for name in (*_WRITTEN, "work", "root"):
            os.mkdir(f"{self._folder}/{name}", 0o755)
        # Mount relative to a folder descriptor, because no path leads to the trees.
        os.fchdir(self._trees)
        layers = f"lowerdir={tree},upperdir={self._folder}/up,workdir={self._folder}/work,userxattr"
        kernel.mount("overlay", self._root, "overlay", _FLAGS, layers)
        os.chdir("/")
        kernel.mount("/dev", f"{self._root}/dev", "", kernel.MS_BIND | kernel.MS_REC)
        kernel.mount(f"{self._folder}/shm", f"{self._root}/dev/shm", "", kernel.MS_BIND)

    def _facts(self) -> bytes:
        """Return metadata that differ whenever the content of the writable part has changed."""
        kernel.take(self._look)
        return b"".join(seen.raw for seen in self._seen)
