"""Unpacks layers and stacks them, without root, in a child process that can write to only one folder.

    layer: archive -> layers/HASH      with whiteouts as files `.wh.NAME`, as the archive has them
    tree:  layers/…, lowest first -> trees/CHAIN     hard links to the layers' files; whiteouts applied

Layers are hostile. The kernel resolves every path as if the target folder were the root (openat2 with RESOLVE_IN_ROOT),
and Landlock lets the child write nowhere else. A child that root starts first becomes the images' user. All files
belong to one user. In a container root could read and write every file, so each file's owner gets these rights; set-id
bits, device nodes and extended attributes are dropped.
"""

# Paths in this module are relative to folder descriptors, which pathlib can't use.
# ruff: noqa: PTH115, PTH120
from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import stat
import struct
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from isal import isal_zlib

from rayapp.sandbox.local.levels import kernel, landlock, seccomp

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
MOUNT_POINTS = ("dev", "proc", "sys", "tmp")
_AUFS = ".wh..wh."
_MAX_DEPTH, _MAX_NOTES = 256, 200_000
_MAX_LINKS_FOLLOWED = 40
_MAX_RATIO, _RATIO_COUNTS_FROM = 200, 1 << 30
_MEMORY_BYTES = 2 << 30
_CHUNK = 1 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_DAMAGED = ("EOFError", "IsalError", "ZstdError")
"""Names of the errors of the decompressors: zstd is imported only where a layer needs it."""
_WINDOW_LOG = 27
"""Largest accepted window of a zstd layer, as a power of two. It is zstd's own default."""
_RESOLVE_IN_ROOT, _RESOLVE_NO_MAGICLINKS = 0x10, 0x02
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_PYTHON = "python3"


class BadLayerError(Exception):
    """A layer is damaged, hostile or too large; the message says which."""


@dataclass(slots=True, kw_only=True)
class Unpacked:
    """Facts about an unpacked layer that can't be read from its files."""

    diff_id: str = ""
    num_bytes: int = 0
    num_files: int = 0
    implicit: list[str] = field(default_factory=list)
    """Folders that the archive has no entry for but puts files in. In a lower layer they may be symbolic links."""
    links: list[tuple[str, str]] = field(default_factory=list)
    """Hard links (path, target) to files of lower layers."""


def open_in(root: int, path: str, flags: int) -> int:
    """Open a path as if the folder `root` were the root of the file system: symbolic links can't lead out of it.

    Raises:
        OSError: the path can't be opened, as in os.open.
    """
    how = struct.pack("<QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    return kernel.syscall(
        seccomp.number("openat2"),
        ctypes.c_int(root),
        os.fsencode(path or "."),
        how,
        ctypes.c_size_t(len(how)),
        name="openat2",
    )


class _Stream:
    """The uncompressed archive, hashed, counted and bounded as it is read; for tarfile a file that seeks forward only.

    Its parts go from the decompressor to the files without a copy in between.
    """

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._stored = _Stored(file)
        self._parts = _decompressed(self._stored)
        self._rest = memoryview(b"")
        self._position = 0
        self._max_bytes = max_bytes
        self.hash = hashlib.sha256()
        self.num_bytes = 0

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise ValueError(f"an entry begins at byte {position}, but the entry before ends at byte {self._position}")
        for _ in self.parts(position - self._position):
            pass

    def read(self, size: int) -> bytes:
        return b"".join(self.parts(size))

    def parts(self, size: int) -> Iterator[memoryview]:
        """Yield the next bytes, in parts; fewer than `size` at the end of the archive."""
        while size > 0 and (self._rest or self._more()):
            part, self._rest = self._rest[:size], self._rest[size:]
            self._position += len(part)
            size -= len(part)
            yield part

    def _more(self) -> bool:
        """Take the next part from the decompressor; return False at the end of the archive."""
        part = next(self._parts, b"")
        self.hash.update(part)
        self.num_bytes += len(part)
        if self.num_bytes > self._max_bytes:
            raise BadLayerError(f"it unpacks to more than {self._max_bytes} bytes")
        if self.num_bytes > max(_RATIO_COUNTS_FROM, _MAX_RATIO * self._stored.num_bytes):
            raise BadLayerError(f"it unpacks to more than {_MAX_RATIO} times its size")
        self._rest = memoryview(part)
        return bool(part)


class _Stored:
    """A layer as it is stored, in a file or from a pipe; counts the bytes that were read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._first = file.read(_CHUNK)
        self.begin = self._first[:4]
        self.num_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data, self._first = self._first or self._file.read(size), b""
        self.num_bytes += len(data)
        return data


def _decompressed(file: _Stored) -> Iterator[bytes]:
    try:
        if file.begin[:2] == _GZIP:
            yield from _gunzipped(file)
        elif file.begin == _ZSTD:
            from backports import zstd

            options = {zstd.DecompressionParameter.window_log_max: _WINDOW_LOG}
            with zstd.ZstdFile(file, options=options) as stream:  # type: ignore[call-overload]
                while data := stream.read(_CHUNK):
                    yield data
        else:
            while data := file.read(_CHUNK):
                yield data
    except Exception as error:
        if type(error).__name__ in _DAMAGED:
            raise BadLayerError(f"it can't be decompressed: {error}") from error
        raise


def _gunzipped(file: _Stored) -> Iterator[bytes]:
    """Yield the content of all members of a gzip file; layers made for lazy pulling have one member for each file."""
    member = isal_zlib.decompressobj(31)
    while data := file.read(_CHUNK):
        while data:
            if member.eof:
                member = isal_zlib.decompressobj(31)
            if part := member.decompress(data, _CHUNK):
                yield part
            data = member.unconsumed_tail or member.unused_data
            if member.eof and not data.strip(b"\0"):
                data = b""
    if not member.eof:
        raise EOFError("it is cut off")


def unpack(file: IO[bytes], root: int, *, max_bytes: int, max_files: int) -> Unpacked:
    """Unpack a layer into an empty folder.

    Raises:
        BadLayerError: the layer is damaged, hostile or too large.
    """
    stream = _Stream(file, max_bytes)
    layer = _Layer(root, stream, max_bytes)
    try:
        with tarfile.open(fileobj=stream, mode="r:") as archive:  # type: ignore[call-overload]
            for member in archive:
                layer.facts.num_files += 1
                if layer.facts.num_files > max_files:
                    raise BadLayerError(f"it has more than {max_files} files")
                layer.add(member, archive)
                archive.members = []  # otherwise tarfile would keep every entry in memory
        stream.seek(sys.maxsize)
        layer.finish()
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise BadLayerError(f"it is not a valid tar archive: {type(error).__name__}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BadLayerError(f"one of its files can't be written: {error}") from error
    layer.facts.diff_id, layer.facts.num_bytes = f"sha256:{stream.hash.hexdigest()}", stream.num_bytes
    return layer.facts


class _Layer:
    """A folder into which a layer's files are unpacked."""

    def __init__(self, root: int, stream: _Stream, max_bytes: int) -> None:
        self._root = root
        self._stream = stream
        self._max_bytes = self._bytes_left = max_bytes
        """Bytes that the layer's files may still have. The archive's size is not enough, because a sparse file is
        larger than its part of the archive."""
        self._folder = ("", os.dup(root))
        """Path and open descriptor of the last entry's folder, because most entries are in the same folder as the
        last."""
        self._modes: dict[str, tuple[int, float]] = {}
        """Mode and modification time of each folder. They are set at the end, because each new file changes the
        folder's time."""
        self.facts = Unpacked()

    def add(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        path = clean(member.name)
        above, _, name = path.rpartition("/")
        if not name:
            return
        if name.startswith(WHITEOUT):
            if name == OPAQUE or not name.startswith(_AUFS):
                self._make_file(self._enter(above), name, member, None)
            return
        folder = self._enter(above)
        if member.isdir():
            self._make_folder(folder, path, name, member)
        elif member.isreg():
            self._make_room(folder, name)
            self._make_file(folder, name, member, archive)
        elif member.issym():
            self._make_room(folder, name)
            os.symlink(member.linkname, name, dir_fd=folder)
            os.utime(name, (member.mtime, member.mtime), dir_fd=folder, follow_symlinks=False)
        elif member.islnk():
            self._make_room(folder, name)
            self._link(folder, path, clean(member.linkname))
        elif member.isfifo():
            self._make_room(folder, name)
            os.mkfifo(name, member.mode & 0o777 | 0o600, dir_fd=folder)
        # Device nodes are left out.

    def finish(self) -> None:
        for path, (mode, mtime) in sorted(self._modes.items(), reverse=True):
            try:
                folder = open_in(self._root, path, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue  # a later entry has replaced the folder
            os.fchmod(folder, mode & 0o1777 | 0o700)
            os.utime(folder, (mtime, mtime))
            os.close(folder)
        os.close(self._folder[1])

    def _enter(self, path: str) -> int:
        """Return a descriptor of the folder; make the folder if it is missing."""
        if self._folder[0] != path:
            os.close(self._folder[1])
            self._folder = ("/", -1)
            self._folder = (path, self._open_folder(path, _MAX_LINKS_FOLLOWED))
        return self._folder[1]

    def _open_folder(self, path: str, links_left: int) -> int:
        try:
            return open_in(self._root, path, _FOLDER)
        except FileNotFoundError:
            above, _, name = path.rpartition("/")
        parent = self._open_folder(above, links_left)
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
            self._note(self.facts.implicit, path, "folders without an entry of their own")
        except FileExistsError:
            # The path is a link to a folder of a lower layer: make that folder in this layer, too.
            if not links_left:
                raise
            target = os.readlink(name, dir_fd=parent)
            inner = target if target.startswith("/") else f"{above}/{target}"
            os.close(self._open_folder(clean(os.path.normpath(f"/{inner}")), links_left - 1))
        finally:
            os.close(parent)
        return open_in(self._root, path, _FOLDER)

    def _make_room(self, folder: int, name: str) -> None:
        """Remove an earlier entry of the same name."""
        try:
            found = os.lstat(name, dir_fd=folder)
        except FileNotFoundError:
            return
        remove(folder, name, is_folder=stat.S_ISDIR(found.st_mode))
        if stat.S_ISDIR(found.st_mode):
            self._folder = ("/", self._folder[1])  # `self._folder` may be inside the removed folder

    def _make_folder(self, folder: int, path: str, name: str, member: tarfile.TarInfo) -> None:
        try:
            is_folder = stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode)
        except FileNotFoundError:
            os.mkdir(name, 0o700, dir_fd=folder)
        else:
            if not is_folder:
                remove(folder, name, is_folder=False)
                os.mkdir(name, 0o700, dir_fd=folder)
            elif path in self.facts.implicit:
                self.facts.implicit.remove(path)
        self._modes[path] = member.mode, member.mtime

    def _make_file(self, folder: int, name: str, member: tarfile.TarInfo, archive: tarfile.TarFile | None) -> None:
        """Make a file with the content of a member; an empty one without an archive."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=folder)
        try:
            for data in self._content(member, archive) if archive else ():
                self._bytes_left -= len(data)
                if self._bytes_left < 0:
                    raise BadLayerError(f"its files have more than {self._max_bytes} bytes")
                written = 0
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            os.fchmod(descriptor, member.mode & 0o777 | 0o600)
            os.utime(descriptor, (member.mtime, member.mtime))
        finally:
            os.close(descriptor)

    def _content(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> Iterator[memoryview]:
        if member.issparse():
            content = archive.extractfile(member)
            while content is not None and (data := content.read(_CHUNK)):
                yield memoryview(data)
            return
        self._stream.seek(member.offset_data)
        yield from self._stream.parts(member.size)
        if self._stream.tell() != member.offset_data + member.size:
            raise tarfile.ReadError("unexpected end of data")

    def _link(self, folder: int, path: str, target: str) -> None:
        above, _, name = target.rpartition("/")
        try:
            there = open_in(self._root, above, _FOLDER)
        except FileNotFoundError:
            self._note(self.facts.links, (path, target), "hard links to files of other layers")
            return
        try:
            own = path.rpartition("/")[2]
            os.link(name, own, src_dir_fd=there, dst_dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            self._note(self.facts.links, (path, target), "hard links to files of other layers")
        finally:
            os.close(there)

    def _note(self, notes: list[Any], note: object, what: str) -> None:
        if len(notes) >= _MAX_NOTES:
            raise BadLayerError(f"it has more than {_MAX_NOTES} {what}")
        notes.append(note)


def clean(path: str) -> str:
    """Return a path of an archive without a leading slash and without `.` components.
    Raises:
        BadLayerError: the path leads out of its folder, or has too many components.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadLayerError(f"the path {path[:200]!r} leads out of the image's root folder")
    if len(parts) > _MAX_DEPTH:
        raise BadLayerError(f"the path {path[:200]!r} has more than {_MAX_DEPTH} components")
    return "/".join(parts)


def remove(folder: int, name: str, *, is_folder: bool) -> None:
    if is_folder:
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def stack(layers: list[tuple[int, Unpacked]], root: int) -> None:
    """Fill an empty folder with the files of these layers, as hard links, lowest layer first."""
    for layer, facts in layers:
        implicit = frozenset(facts.implicit)
        _stack_folder(layer, root, root, "", implicit)
        for path, target in facts.links:
            _link_late(root, path, target)
    for name in MOUNT_POINTS:
        _make_mount_point(root, name)


def _stack_folder(source: int, target: int, root: int, path: str, implicit: frozenset[str]) -> None:
    """Add a layer's folder to the tree's folder. `source`, `target` and `root` are descriptors, so that no link leads
    out of the tree.
    """
    entries = [(name, os.lstat(name, dir_fd=source)) for name in os.listdir(source)]
    for name, _ in entries:
        if name == OPAQUE:
            for below in os.listdir(target):
                _remove_any(target, below)
        elif name.startswith(WHITEOUT):
            _remove_any(target, name.removeprefix(WHITEOUT))
    for name, facts in entries:
        if name.startswith(WHITEOUT):
            continue
        if not stat.S_ISDIR(facts.st_mode):
            _remove_any(target, name)
            _hard_link(source, target, name)
            continue
        inner_path = f"{path}/{name}" if path else name
        is_implicit = inner_path in implicit
        inner_source = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=source)
        inner = _enter_in_tree(target, root, name, inner_path if is_implicit else "")
        try:
            as_wanted = os.fstat(inner) if is_implicit else facts
            _stack_folder(inner_source, inner, root, inner_path, implicit)
            os.fchmod(inner, stat.S_IMODE(as_wanted.st_mode))
            os.utime(inner, ns=(as_wanted.st_mtime_ns, as_wanted.st_mtime_ns))
        finally:
            os.close(inner)
            os.close(inner_source)


def _enter_in_tree(target: int, root: int, name: str, linked: str) -> int:
    """Return a descriptor of a folder in the tree; make the folder if it is missing.

    Args:
        linked: path of the folder if a symbolic link in its place is followed; empty if the link is replaced.
    """
    try:
        mode = os.lstat(name, dir_fd=target).st_mode
    except FileNotFoundError:
        mode = 0
    if stat.S_ISLNK(mode) and linked:
        try:
            return open_in(root, linked, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            pass  # the link leads nowhere: replace it by a folder
    if not stat.S_ISDIR(mode):
        if mode:
            remove(target, name, is_folder=False)
        os.mkdir(name, 0o755, dir_fd=target)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=target)


def _hard_link(source: int, target: int, name: str) -> None:
    try:
        os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EMLINK:
            raise
        _copy_file(source, target, name)


def _copy_file(source: int, target: int, name: str) -> None:
    """Copy a file that has as many hard links as the file system allows."""
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=source), "rb") as original:
        facts = os.fstat(original.fileno())
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=target)
        with os.fdopen(descriptor, "wb") as copy:
            shutil.copyfileobj(original, copy)
            os.fchmod(copy.fileno(), stat.S_IMODE(facts.st_mode))
            os.utime(copy.fileno(), ns=(facts.st_mtime_ns, facts.st_mtime_ns))


def _link_late(root: int, path: str, target: str) -> None:
    (above, _, name), (there, _, old) = path.rpartition("/"), target.rpartition("/")
    try:
        folder, other = open_in(root, above, os.O_RDONLY | os.O_DIRECTORY), open_in(root, there, _FOLDER)
        before = os.fstat(folder)
        os.link(old, name, src_dir_fd=other, dst_dir_fd=folder, follow_symlinks=False)
        os.utime(folder, ns=(before.st_mtime_ns, before.st_mtime_ns))
    except OSError as error:
        raise BadLayerError(f"the hard link {path[:200]!r} to {target[:200]!r} can't be made: {error}") from error
    os.close(folder)
    os.close(other)


def _remove_any(folder: int, name: str) -> None:
    try:
        found = os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return
    remove(folder, name, is_folder=stat.S_ISDIR(found.st_mode))


def _make_mount_point(root: int, name: str) -> None:
    """Make `name` a folder, not a symbolic link: a mount would follow a link out of the tree."""
    try:
        if stat.S_ISDIR(os.lstat(name, dir_fd=root).st_mode):
            return
        os.unlink(name, dir_fd=root)
    except FileNotFoundError:
        pass
    os.mkdir(name, 0o1777 if name == "tmp" else 0o755, dir_fd=root)


def user_of(root: int, user: str) -> tuple[int, int, str]:
    """Return user id, group id and home of an image's USER: `name`, `id`, `name:group` or `id:group`.

    Raises:
        BadLayerError: the image's /etc/passwd or /etc/group has no such name.
    """
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
        raise BadLayerError(f"its USER {user[:80]!r} is not in its /etc/passwd or /etc/group")
    if max(uid, gid) >= 1 << 31:
        raise BadLayerError(f"its USER {user[:80]!r} has an id of 2^31 or more")
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
    """Return the path of the image's python3; empty if there is none, or if its file name says that it is older than
    3.9.
    """
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
    """Return False if a Python is older than 3.9 or has only a part of the standard library (Debian's
    python3-minimal).
    """
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
    """Run in the child process: read one job from standard input, do it, and print its result. The job is a line of
    JSON; the stored bytes of a layer follow it."""
    job = json.loads(sys.stdin.buffer.readline())
    try:
        found = _do(job)
    except BadLayerError as error:
        found = {"problem": str(error)}
    except OSError as error:
        found = {"failed": f"{error.strerror or error}: {error.filename or job['target']}", "errno": error.errno}
    json.dump(found, sys.stdout)


def _do(job: dict[str, Any]) -> dict[str, object]:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.umask(0)
    # Open the folder before this process gives up root, because the cache's parent folders may be closed to other
    # users.
    folder = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    root = os.open(job["target"], folder)
    layers = [(os.open(path, folder), Unpacked(**facts)) for path, facts in job.get("layers", [])]
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    for what, value in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (value, value))
    _confine([root, *(layer for layer, _ in layers)])
    if "max_bytes" in job:
        found = unpack(sys.stdin.buffer, root, max_bytes=job["max_bytes"], max_files=job["max_files"])
        return {name: getattr(found, name) for name in Unpacked.__slots__}
    stack(layers, root)
    uid, gid, home = user_of(root, job["user"])
    return {"uid": uid, "gid": gid, "home": home, "python": python_in(root, job["search_path"])}


def _confine(folders: list[int]) -> None:
    """Let this process write only below these folders, if the kernel has Landlock. To make hard links, a process needs
    rights on the folders of both the source and the target.
    """
    from backports import zstd  # noqa: F401  (loaded now: no file can be opened afterwards)

    if landlock.abi() < 1:
        return
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    ruleset = landlock.create_ruleset()
    for folder in folders:
        landlock.allow_descriptor(ruleset, folder, landlock.read_write())
    kernel.take([landlock.restriction(ruleset)])
