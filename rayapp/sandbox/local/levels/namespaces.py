"""The levels `ns+proc` and `ns`: user, mount, pid, net, ipc, uts and cgroup namespaces around Landlock and seccomp.

With a loopback (`loopback.py`) the levels are called `ns+proc+lo` and `ns+lo`. Only levels with `proc` in their name
show a /proc. A zygote for sandboxes on images mounts the folder of all images at a hidden path, and each execution
enters one image (`overlay.py`).

    started by rayapp, unprivileged uid
      └─ unshare(all) ─ fork ─> zygote: pid 1 of its own pid namespace, root folder of `visible_files.py`, no network
                                  └─ fork per execution: pid 1 of another pid namespace, private mounts, no capabilities

Every mount of a zygote is read-only, whatever made it (`_change_root`), except these, which are made later:

    /tmp                          a tmpfs of `disk_mib`: the sandbox's home; each function call has its own while it
                                  holds files. A /tmp that code changed is never given to another sandbox.
    /.image-home, /.image-calls   a tmpfs of `disk_mib`: the writable part of an image and its /dev/shm, likewise
    /proc                         the execution's own processes, gone with them

When an execution's first process is killed, the kernel kills every process in its pid namespace, daemons included.
Killing the zygote ends the whole tree. This module runs only in the zygote and its forks.
"""

# Paths in this module are strings for mount(), so it uses os and not pathlib.
# ruff: noqa: PTH102, PTH103, PTH106, PTH112, PTH114, PTH115, PTH211
from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from pathlib import Path

from rayapp.sandbox.local.inside.privileges import make_mount_point
from rayapp.sandbox.local.levels import kernel, landlock, loopback, rules, seccomp
from rayapp.sandbox.local.levels.level import Place
from rayapp.sandbox.local.levels.limits import MIB, Bounds, Limits, Usage, resource_bounds
from rayapp.sandbox.local.levels.overlay import ImageMount
from rayapp.sandbox.local.levels.visible_files import (
    DEVICES,
    LIBRARY_IN_IMAGES,
    LINKS,
    SYSTEM,
    ImageView,
    View,
    spare_mount_point,
)

_ALL = (
    kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip
NAMES = ("ns+proc", "ns", "ns+proc+lo", "ns+lo")
_TMP = "/tmp"
_BELOW_TMP = "/.below-tmp"  # mounts of needed paths below the machine's /tmp, by number, for each new /tmp
_HIDDEN = "/.hidden"
# Mounts for the sandbox's own files (`Place.home`), and for function calls.
_IMAGE_MOUNTS = {True: "/.image-home", False: "/.image-calls"}
_MAX_FILES = 1024
_PLAIN = kernel.MS_NOSUID | kernel.MS_NODEV
_seen = ctypes.create_string_buffer(kernel.STATX_BYTES)
_LOOK = [kernel.statx_step(_TMP, _seen)]
_AT_RECURSIVE = 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4


class Namespaces:
    """The isolation levels with namespaces; `level.Level` describes their methods."""

    num_spares = 2

    def __init__(
        self, view: View, *, with_proc: bool, with_loopback: bool = False, images: ImageView | None = None
    ) -> None:
        self.name = f"ns{'+proc' if with_proc else ''}{'+lo' if with_loopback else ''}"
        self._with_loopback = with_loopback
        self.listener: socket.socket | None = None
        self._view = view
        self._below_tmp = [path for path in view.extra() if path.startswith(f"{_TMP}/")]
        self._with_proc = with_proc
        self._images = images
        # Mount with key True holds the sandbox's files; with False it is for function calls.
        self._mounts: dict[bool, ImageMount] = {}
        self._mount: ImageMount | None = None  # for which the last child was forked; None without an image
        self._disk_mib = 0  # of /tmp; 0 while there is none
        self._tmp_is_new = False
        self._tmp_is_home = False
        # Metadata of /tmp before an execution; a difference shows a change.
        self._untouched: tuple[bytes, list[str]] = b"", []
        self._inodes = kernel.InodeCounter(_TMP)
        self._ruleset = -1
        self._filter = bytearray(rules.closing())
        self._steps: list[kernel.Step] = []  # with which a child confines itself
        self._enter_pid_namespace: list[kernel.Step] = []
        self._leave_pid_namespace: list[kernel.Step] = []
        self.usage = Usage(-1)

    def enter(self) -> None:
        uid, gid = os.getuid(), os.getgid()
        # otherwise root would own /proc/self, and the user namespace's maps could not be written
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
        kernel.unshare(_ALL)
        Path("/proc/self/setgroups").write_text("deny")
        inner = (self._images.uid, self._images.gid) if self._images else (uid, gid)
        Path("/proc/self/uid_map").write_text(f"{inner[0]} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{inner[1]} {gid} 1")
        _become_init()
        outer = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self._enter_pid_namespace = [kernel.unshare_step(kernel.CLONE_NEWPID)]
        self._leave_pid_namespace = [kernel.setns_step(outer, kernel.CLONE_NEWPID)]
        self.usage = Usage.of_this_process()
        self.usage.counts_sockets = True
        kernel.sethostname("sandbox")
        self.listener = loopback.listen() if self._with_loopback else None
        self._build_root()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.limit_bounding_set()
        seccomp.install(rules.standing(has_loopback=self._with_loopback))

    def fork(self) -> int:
        kernel.take(self._enter_pid_namespace)
        pid = kernel.fork()
        if pid:
            # Leave the child's pid namespace: otherwise the next child would join this execution's namespace.
            kernel.take(self._leave_pid_namespace)
        return pid

    def prepare(self, place: Place) -> None:
        self._mount = self._mounts[place.home] if place.image else None
        if self._mount:
            self._mount.prepare(place)
            return
        if not self._tmp_is_home and not (self._tmp_is_new and self._disk_mib == place.disk_mib):
            self._renew_tmp(place.disk_mib)
        self._tmp_is_home |= place.home

    def confine(self, place: Place) -> None:
        # Make a new process group. Otherwise a signal that code sends to its own group would also reach the zygote.
        os.setsid()
        if self._mount:
            self._mount.enter(with_proc=self._with_proc)
            kernel.take(self._mount.steps)
            return
        own = self._mounts_of_its_own(place)
        if own:
            kernel.unshare(kernel.CLONE_NEWNS)
        if own == "proc":
            kernel.mount("proc", "/proc", "proc", _PLAIN | kernel.MS_NOEXEC, "subset=pid")
        elif own == "tmp":
            self._mount_tmp(_PLAIN, place.disk_mib)
            landlock.allow(self._ruleset, _TMP, landlock.read_write())
        if own:
            os.chdir(_TMP)
        kernel.take(self._steps)

    def bounds(self, limits: Limits, *, running: int) -> Bounds:
        return resource_bounds(limits, num_running=running)

    def _mounts_of_its_own(self, place: Place) -> str:
        """Return the mount that an execution needs of its own: "proc", "tmp" (empty), or none.

        Function calls get an empty /tmp if /tmp is the sandbox's home, so that they don't see its files.
        """
        if place.home:
            return "proc" if self._with_proc else ""
        return "tmp" if self._tmp_is_home else ""

    def reset(self) -> None:
        self._tmp_is_home = self._tmp_is_new = False
        for mount in self._mounts.values():
            mount.forget()

    def is_unchanged(self) -> bool:
        return not self._mounts and self._is_tmp_untouched()

    def sweep(self, session: int) -> bool:
        """Return True if the working folder is unchanged. All processes have ended with their pid namespace. /tmp is
        checked now, while no child uses it, because later children are forked while the next execution runs."""
        if self._mount:
            return self._mount is self._mounts[True] or self._mount.is_untouched()
        if not self._tmp_is_home:
            self._tmp_is_new = self._is_tmp_untouched()
        return self._tmp_is_home or self._tmp_is_new

    def _is_tmp_untouched(self) -> bool:
        has_made_files = self._inodes.has_moved()
        return not has_made_files and self._untouched == _look_at_tmp()

    def _renew_tmp(self, disk_mib: int) -> None:
        # Called only if the last execution changed /tmp; most code does not.
        if self._disk_mib:
            kernel.umount(_TMP, kernel.MNT_DETACH)
            os.close(self._ruleset)
        # With atime, reading a file would count as a change.
        self._mount_tmp(_PLAIN | kernel.MS_NOATIME, disk_mib)
        os.chdir(_TMP)
        self._inodes.begin()
        self._disk_mib, self._tmp_is_new, self._untouched = disk_mib, True, _look_at_tmp()
        self._ruleset = landlock.create_ruleset()
        landlock.allow(self._ruleset, "/", landlock.READ_ONLY)
        landlock.allow(self._ruleset, _TMP, landlock.read_write())
        for device in DEVICES:
            landlock.allow(self._ruleset, f"/dev/{device}", landlock.DEVICE)
        if self._with_loopback:
            landlock.allow_port(self._ruleset, loopback.PORT)
        closing = seccomp.installation(self._filter)
        self._steps = [landlock.restriction(self._ruleset), kernel.CLEAR_CAPABILITIES, closing]

    def _mount_tmp(self, flags: int, disk_mib: int) -> None:
        kernel.mount("tmpfs", _TMP, "tmpfs", flags, _tmpfs_options(disk_mib))
        for number, path in enumerate(self._below_tmp):
            kept = f"{_BELOW_TMP}/{number}"
            make_mount_point(path, is_dir=os.path.isdir(kept))
            kernel.mount(kept, path, "", kernel.MS_BIND | kernel.MS_REC)  # read-only, like the mount in `kept`

    def _build_root(self) -> None:
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        root = spare_mount_point(self._view.sources())
        kernel.mount("tmpfs", root, "tmpfs", _PLAIN, "size=1m,mode=755")
        _bind_system(root)
        targets = {path: f"{_BELOW_TMP}/{number}" for number, path in enumerate(self._below_tmp)}
        for source in self._view.extra():
            _bind_read_only(source, root + targets.get(source, source))
            if source == self._view.library:
                for folder in _installed_packages(root, targets.get(source, source)):
                    kernel.mount("tmpfs", folder, "tmpfs", _PLAIN, "size=64k,mode=755")
        _make_devices(root)
        _write_etc(root)
        for folder in (_TMP, "/proc", "/.old"):
            os.mkdir(root + folder, 0o700)
        for path, target in LINKS.items():
            if not os.path.lexists(root + path):
                os.symlink(target, root + path)
        if self._with_proc:
            _keep_proc(root)
        if self._images:
            self._show_images(root, self._images)
        _hide(root)
        self._change_root(root)

    def _show_images(self, root: str, images: ImageView) -> None:
        for folder in (*_IMAGE_MOUNTS.values(), "/dev/shm"):
            os.mkdir(root + folder, 0o755)
        library = root + LIBRARY_IN_IMAGES
        _bind_read_only(self._view.library, library)
        for name in ("site-packages", "dist-packages"):
            if os.path.isdir(f"{library}/{name}"):
                kernel.mount("tmpfs", f"{library}/{name}", "tmpfs", _PLAIN, "size=64k,mode=755")
        trees = f"{root}{_HIDDEN}/trees"
        _bind_read_only(images.trees, trees)
        held = os.open(trees, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._mounts = {
            home: ImageMount(folder, held, has_loopback=self._with_loopback) for home, folder in _IMAGE_MOUNTS.items()
        }

    def _change_root(self, root: str) -> None:
        os.chdir(root)
        kernel.pivot_root(".", ".old")
        os.chdir("/")
        kernel.umount("/.old", kernel.MNT_DETACH)
        os.rmdir("/.old")
        _set_attributes("/", _ATTR_RDONLY | _ATTR_NOSUID)


def _become_init() -> None:
    """Continue in a child, which is pid 1 of the new pid namespace. The parent only waits for the child's end."""
    pid = os.fork()
    if pid == 0:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    # Close this process's copy of the channel: when the zygote dies, the provider must see an end of file.
    os.closerange(3, 1024)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)


def _look_at_tmp() -> tuple[bytes, list[str]]:
    # Attributes too: before Linux 6.13 a change right after another one did not always change the times.
    kernel.take(_LOOK)
    return _seen.raw, os.listxattr(_TMP)


def _tmpfs_options(disk_mib: int) -> str:
    return f"size={disk_mib * MIB},nr_inodes={_MAX_FILES},mode=700"


def _keep_proc(root: str) -> None:
    """Mount a complete /proc, which `_hide` hides; else the kernel would not let children mount their own."""
    proc = f"{root}{_HIDDEN}/proc"
    os.makedirs(proc)
    kernel.mount("proc", proc, "proc", _PLAIN | kernel.MS_NOEXEC)


def _hide(root: str) -> None:
    os.makedirs(root + _HIDDEN, exist_ok=True)
    kernel.mount("tmpfs", root + _HIDDEN, "tmpfs", _PLAIN | kernel.MS_RDONLY, "size=4k,nr_inodes=2,mode=0")


def _bind_system(root: str) -> None:
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
        elif os.path.isdir(path):
            _bind_read_only(path, root + path)


def _bind_read_only(source: str, target: str) -> None:
    if not Path(target).exists():
        make_mount_point(target, is_dir=os.path.isdir(source))
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    _set_attributes(target, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)


def _set_attributes(target: str, flags: int) -> None:
    attributes = struct.pack("<QQQQ", flags, 0, 0, 0)
    kernel.syscall(
        seccomp.number("mount_setattr"),
        ctypes.c_int(kernel.AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
        name="mount_setattr",
    )


def _installed_packages(root: str, library: str) -> list[str]:
    """Return the folders of installed packages, which are hidden, as they may hold rayapp's own code."""
    parents = (
        Path(root + library),
        *Path(f"{root}/usr/lib").glob("python3*"),
        *Path(f"{root}/usr/local/lib").glob("python3*"),
    )
    found = {
        str(path)
        for parent in parents
        for name in ("site-packages", "dist-packages")
        if (path := parent / name).is_dir()
    }
    return sorted(found)


def _make_devices(root: str) -> None:
    os.mkdir(f"{root}/dev", 0o755)
    for device in DEVICES:
        target = f"{root}/dev/{device}"
        Path(target).touch()
        kernel.mount(f"/dev/{device}", target, "", kernel.MS_BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{name}")


def _write_etc(root: str) -> None:
    etc = Path(root, "etc")
    etc.mkdir()
    uid, gid = os.getuid(), os.getgid()
    (etc / "passwd").write_text(f"sandbox:x:{uid}:{gid}:sandbox:{_TMP}:/bin/sh\n")
    (etc / "group").write_text(f"sandbox:x:{gid}:\n")
    (etc / "hostname").write_text("sandbox\n")
    for name in ("ld.so.cache", "alternatives", *(path.name for path in Path("/etc").glob("java-*-openjdk"))):
        if os.access(f"/etc/{name}", os.R_OK):
            _bind_read_only(f"/etc/{name}", f"{root}/etc/{name}")
