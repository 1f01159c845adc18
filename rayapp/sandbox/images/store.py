"""The cache of images on one node: unpacked layers, trees and records, under one folder.

    layers/HASH/, layers/HASH.json    an unpacked layer, named by the digest of its uncompressed archive
    trees/CHAIN/                      an image's whole file system: hard links to its layers' files
    images/CHAIN-….json               a record for each image: its tree, user, environment; the record's
                                      modification time is the time of the image's last use
    names/HASH.json                   the image that a name stood for when it was last pulled
    blobs/HASH.part                   a download that may be continued
    locks/                            one lock file for each of these

Everything is written under a temporary name and renamed when its content is on disk, so a layer, tree or record under
its final name is complete. Readers of a layer or tree hold a shared lock on it. Eviction removes only layers and trees
on which it gets an exclusive lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from rayapp.core.errors import ImageError
from rayapp.core.files import aside, fsync, remove_tree
from rayapp.sandbox.images.reference import Reference
from rayapp.sandbox.local.inside.privileges import images_uid
from rayapp.sandbox.local.levels import kernel

_GIB = 1 << 30
_PENDING = ".pending"
FORMAT = 1
"""Version of the format of records and trees. Records of another version are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Record of an image that is unpacked in the cache, with everything that a sandbox needs to know about it."""

    name: str
    """Name under which the image was pulled, with the digest of its manifest."""
    digest: str
    tree: str
    """Name of the image's folder in `trees/`."""
    layers: tuple[str, ...]
    """Digests of the image's uncompressed layers, lowest first."""
    num_bytes: int
    env: tuple[tuple[str, str], ...]
    workdir: str
    uid: int
    gid: int
    home: str
    python: str
    """Path of the image's python3; empty if the image has no usable one."""
    format: int = FORMAT

    @property
    def user(self) -> tuple[int, int]:
        return self.uid, self.gid


class Hold:
    """A shared lock on an image: the image can't be evicted until `release` is called or this process ends."""

    def __init__(self, image: Image, file: IO[bytes]) -> None:
        self.image = image
        self._file = file

    def release(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Store:
    """The cache of images in one folder, for any number of processes and threads."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    @property
    def trees(self) -> Path:
        """Folder of the trees. Zygotes (warm interpreters) mount trees from it; sandboxes don't see the folder
        itself.
        """
        return self.folder / "trees"

    def prepare(self) -> Self:
        """Make the cache's folders. Raises ImageError: this user may not make them."""
        try:
            for name in ("layers", "trees", "images", "names", "blobs", "locks"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            if os.geteuid() == 0:
                # Sandboxes run as the images' user, who must enter the folder. Other users must not read private
                # images.
                os.chown(self.folder, 0, images_uid())
                self.folder.chmod(0o710)
        except OSError as error:
            raise ImageError(
                f"the image cache {self.folder} can't be made: {error.strerror}. Choose a folder with "
                "sandbox.providers[].image_cache"
            ) from error
        return self

    # Names and records

    def image(self, digest: str) -> Image | None:
        """Return the image whose manifest has this digest; None if it is not in the cache."""
        try:
            found = json.loads(self._record(digest).read_text())
        except (OSError, ValueError):
            return None
        if found.get("format") != FORMAT or not (self.trees / found["tree"]).is_dir():
            return None
        return Image(**{**found, "layers": tuple(found["layers"]), "env": tuple(map(tuple, found["env"]))})

    def named(self, reference: Reference) -> Image | None:
        """Return the image that was pulled under a name; None if there is none."""
        if reference.kind == "registry" and reference.digest:
            digest = self._resolved(reference) or reference.digest
        else:
            digest = self._resolved(reference)
        return self.image(digest) if digest else None

    def _resolved(self, reference: Reference) -> str:
        try:
            return str(json.loads(self._name(reference).read_text())["digest"])
        except (OSError, ValueError, KeyError):
            return ""

    def put(self, image: Image, *references: Reference) -> None:
        """Write an image's record, and the names that stand for it."""
        _write(self._record(image.digest), asdict(image))
        for reference in references:
            _write(self._name(reference), {"name": str(reference), "digest": image.digest})

    def images(self) -> list[tuple[Image, float]]:
        """Return all images with the times of their last use, least recently used first."""
        found = []
        for path in (self.folder / "images").glob("*.json"):
            with contextlib.suppress(OSError):
                image = self.image(path.stem.replace("-", ":"))
                if image is not None:
                    found.append((image, path.stat().st_mtime))
        return sorted(found, key=lambda each: each[1])

    def names(self) -> dict[str, str]:
        """Return every known name with the digest of its image."""
        found = {}
        for path in (self.folder / "names").glob("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                entry = json.loads(path.read_text())
                found[str(entry["name"])] = str(entry["digest"])
        return found

    # Holding and locking

    def hold(self, image: Image) -> Hold | None:
        """Return a lock on an image and update the image's time of last use; return None if the image was just
        evicted.
        """
        file = self._lock_file(f"tree-{image.tree}").open("ab")
        fcntl.flock(file, fcntl.LOCK_SH)
        if self.image(image.digest) is None:
            file.close()
            return None
        with contextlib.suppress(OSError):
            os.utime(self._record(image.digest))
        return Hold(image, file)

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Wait for an exclusive lock, and hold it for the length of the block."""
        with self._lock_file(name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def keep(self, name: str) -> IO[bytes]:
        """Return an open file that holds a shared lock until it is closed."""
        file = self._lock_file(name).open("ab")
        fcntl.flock(file, fcntl.LOCK_SH)
        return file

    @contextlib.contextmanager
    def _if_unused(self, name: str) -> Iterator[bool]:
        """Yield True with the lock held, or False if another process or thread holds the lock."""
        with self._lock_file(name).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    # Layers

    def layer(self, diff_id: str) -> dict[str, Any] | None:
        """Return the record of an unpacked layer; None if the layer isn't in the cache."""
        try:
            found: dict[str, Any] = json.loads(self._layer_record(diff_id).read_text())
        except (OSError, ValueError):
            return None
        return found if self.layer_folder(diff_id).is_dir() else None

    def layer_folder(self, diff_id: str) -> Path:
        return self.folder / "layers" / _hex(diff_id)

    def blob(self, digest: str) -> Path:
        """Return the path of a download. The file may be missing or incomplete."""
        return self.folder / "blobs" / f"{_hex(digest)}.part"

    @contextlib.contextmanager
    def pending(self, target: Path) -> Iterator[Path]:
        """Yield an empty folder. If the block succeeds, the folder is synced and renamed to `target`, otherwise
        removed.
        """
        making = target.with_name(f"{target.name}{_PENDING}-{os.getpid()}-{os.urandom(4).hex()}")
        making.mkdir(mode=0o755)
        try:
            if os.geteuid() == 0:
                os.chown(making, images_uid(), images_uid())
            yield making
            _sync(making)
            _remove(target)
            making.rename(target)
            fsync(target.parent)
        finally:
            _remove(making)

    def put_layer(self, diff_id: str, facts: Mapping[str, Any]) -> None:
        _write(self._layer_record(diff_id), facts)

    # Size and eviction

    def num_bytes(self) -> int:
        """Return the bytes of all unpacked layers. Trees are hard links to the layers' files, and downloads are removed
        after a pull.
        """
        total = 0
        for path in (self.folder / "layers").glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                total += int(json.loads(path.read_text())["num_bytes"])
        return total

    def make_room(self, num_bytes: int) -> bool:
        """Evict images, least recently used first, until this many bytes fit; return False if they can't."""
        with self.alone("cache"):
            if self.num_bytes() + num_bytes <= self.max_bytes:
                return True
            self._remove_layers()
            for image, _ in self.images():
                if self.num_bytes() + num_bytes <= self.max_bytes:
                    return True
                if self._evict(image):
                    self._remove_layers()
            return self.num_bytes() + num_bytes <= self.max_bytes

    def prune(self, *, unused_s: float = 0.0) -> list[Image]:
        """Remove the images that no process holds and that were not used for this long, and leftovers of interrupted
        pulls.
        """
        with self.alone("cache"):
            before = time.time() - unused_s
            gone = [image for image, used in self.images() if used <= before and self._evict(image)]
            self._remove_layers()
            self._remove_leftovers()
        return gone

    def _evict(self, image: Image) -> bool:
        with self._if_unused(f"tree-{image.tree}") as is_unused:
            if is_unused:
                sharing = [each for each, _ in self.images() if each.tree == image.tree]
                for each in sharing:
                    self._record(each.digest).unlink(missing_ok=True)
                _remove(self.trees / image.tree)
            return is_unused

    def _remove_layers(self) -> None:
        """Remove layers that belong to no image, except layers that a running pull holds."""
        used = {_hex(diff_id) for image, _ in self.images() for diff_id in image.layers}
        for path in (self.folder / "layers").glob("*.json"):
            if path.stem in used:
                continue
            with self._if_unused(f"layer-{path.stem}") as is_unused:
                if is_unused:
                    path.unlink(missing_ok=True)
                    _remove(path.with_suffix(""))

    def _remove_leftovers(self) -> None:
        """Remove temporary files of killed processes. The kernel has released the locks of these processes."""
        for path in (*self.folder.glob(f"*/*{_PENDING}-*"), *(self.folder / "blobs").iterdir()):
            name = path.name.partition(_PENDING)[0].removesuffix(".part")
            kind = "tree" if path.parent == self.trees else "layer" if path.parent.name == "layers" else "blob"
            with self._if_unused(f"{kind}-{name}") as is_unused:
                if is_unused:
                    _remove(path)

    def _record(self, digest: str) -> Path:
        return self.folder / "images" / f"{digest.replace(':', '-')}.json"

    def _name(self, reference: Reference) -> Path:
        return self.folder / "names" / f"{hashlib.sha256(str(reference).encode()).hexdigest()[:32]}.json"

    def _layer_record(self, diff_id: str) -> Path:
        return self.folder / "layers" / f"{_hex(diff_id)}.json"

    def _lock_file(self, name: str) -> Path:
        return self.folder / "locks" / name


def layer_lock(diff_id: str) -> str:
    return f"layer-{_hex(diff_id)}"


def blob_lock(digest: str) -> str:
    return f"blob-{_hex(digest)}"


def default_folder() -> Path:
    """Return the default folder of the cache. For root it is /var/cache/…, because the users of sandboxes can't enter
    root's home.
    """
    if os.geteuid() == 0:
        return Path("/var/cache/rayapp/images")
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rayapp/images"


def open_store(folder: str = "", max_gib: float = 50.0) -> Store:
    """Open the cache of images; make its folders if they are missing. Raises ImageError: the folders can't be made."""
    return Store(Path(folder).expanduser() if folder else default_folder(), max_bytes=int(max_gib * _GIB)).prepare()


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with aside(path) as temporary:
        temporary.write_text(json.dumps(value))


def _sync(folder: Path) -> None:
    """Sync the whole file system of a folder to disk: for thousands of files this is faster than fsync."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        kernel.syncfs(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
