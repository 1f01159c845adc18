"""The cache of images on one node, under one folder.

    trees/NAME/          an image's whole file system
    images/NAME.json     the image's record; its modification time is the time of the image's last use
    names/HASH.json      the digest that a name stood for when it was last pulled
    locks/               one lock file for each tree, and one for the cache

A tree and a record are written under a temporary name and renamed when they are on disk, so each is complete under its
final name. Readers of a tree hold a shared lock on it; eviction removes only trees on which it gets an exclusive lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Self

from rayapp.core.errors import ImageError
from rayapp.core.files import aside, fsync, remove_tree
from rayapp.sandbox.images import Image, Reference
from rayapp.sandbox.local.inside.privileges import images_uid
from rayapp.sandbox.local.levels import kernel

_GIB = 1 << 30
_PENDING = ".pending"


class Hold:
    """A shared lock on an image."""

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
        return self.folder / "trees"

    def prepare(self) -> Self:
        """Make the cache's folders. Raises ImageError."""
        try:
            for name in ("trees", "images", "names", "locks"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            if os.geteuid() == 0:
                # Sandboxes run as the images' user, who must enter the folder; others must not read private images.
                os.chown(self.folder, 0, images_uid())
                self.folder.chmod(0o710)
        except OSError as error:
            raise ImageError(
                f"the image cache {self.folder} can't be made: {error.strerror}. Choose a folder with "
                "sandbox.providers[].image_cache"
            ) from error
        return self

    def image(self, digest: str) -> Image | None:
        return self._read(self._record(digest))

    def _read(self, record: Path) -> Image | None:
        try:
            found = json.loads(record.read_text())
            image = Image(**{**found, "env": tuple(map(tuple, found["env"]))})
        except (OSError, ValueError, TypeError, KeyError):
            return None  # missing, or of an older version
        return image if (self.trees / image.tree).is_dir() else None

    def named(self, reference: Reference) -> Image | None:
        """Return the image that was pulled under a name."""
        try:
            digest = str(json.loads(self._name(reference).read_text())["digest"])
        except (OSError, ValueError, KeyError):
            digest = reference.digest
        return self.image(digest) if digest else None

    def put(self, image: Image, *references: Reference) -> None:
        _write(self._record(image.digest), asdict(image))
        for reference in references:
            _write(self._name(reference), {"name": str(reference), "digest": image.digest})

    def images(self) -> list[tuple[Image, float]]:
        """Return all images with the times of their last use, least recently used first."""
        found = []
        for path in (self.folder / "images").glob("*.json"):
            with contextlib.suppress(OSError):
                if (image := self._read(path)) is not None:
                    found.append((image, path.stat().st_mtime))
        return sorted(found, key=lambda each: each[1])

    def hold(self, image: Image) -> Hold | None:
        """Return a lock on an image, and note its use; None if the image was just evicted."""
        file = self._lock_file(image.tree).open("ab")
        fcntl.flock(file, fcntl.LOCK_SH)
        if self.image(image.digest) is None:
            file.close()
            return None
        with contextlib.suppress(OSError):
            os.utime(self._record(image.digest))
        return Hold(image, file)

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        with self._lock_file(name).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _if_unused(self, name: str) -> Iterator[bool]:
        """Yield whether the lock is held; False if another process or thread holds it."""
        with self._lock_file(name).open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    @contextlib.contextmanager
    def pending(self, tree: str) -> Iterator[Path]:
        """Yield an empty folder, whose `rootfs` becomes the tree if the block succeeds."""
        making = self.trees / f"{tree}{_PENDING}-{os.getpid()}-{os.urandom(4).hex()}"
        making.mkdir(mode=0o755)
        try:
            if os.geteuid() == 0:
                os.chown(making, images_uid(), images_uid())
            yield making
            _sync(making)
            remove_tree(self.trees / tree)
            (making / "rootfs").rename(self.trees / tree)
            fsync(self.trees)
        finally:
            remove_tree(making)

    def num_bytes(self) -> int:
        return sum(image.num_bytes for image, _ in self.images())

    def make_room(self, num_bytes: int) -> bool:
        """Remove leftovers of interrupted pulls, and evict the least recently used images until this many bytes fit;
        return False if they can't."""
        with self.alone("cache"):
            self._remove_leftovers()
            for image, _ in self.images():
                if self.num_bytes() + num_bytes <= self.max_bytes:
                    return True
                self._evict(image)
            return self.num_bytes() + num_bytes <= self.max_bytes

    def _remove_leftovers(self) -> None:
        known = {image.tree for image, _ in self.images()}
        for path in self.trees.iterdir():
            with self._if_unused(path.name.partition(_PENDING)[0]) as is_unused:
                if is_unused and path.name not in known:
                    remove_tree(path)

    def _evict(self, image: Image) -> bool:
        with self._if_unused(image.tree) as is_unused:
            if is_unused:
                self._record(image.digest).unlink(missing_ok=True)
                remove_tree(self.trees / image.tree)
            return is_unused

    def _record(self, digest: str) -> Path:
        return self.folder / "images" / f"{tree_of(digest)}.json"

    def _name(self, reference: Reference) -> Path:
        return self.folder / "names" / f"{hashlib.sha256(str(reference).encode()).hexdigest()[:32]}.json"

    def _lock_file(self, name: str) -> Path:
        return self.folder / "locks" / name


def tree_of(digest: str) -> str:
    """Return the name of an image's tree, short enough for the zygote's requests."""
    return digest.removeprefix("sha256:")[:32]


def open_store(folder: str = "", max_gib: float = 50.0) -> Store:
    """Open the cache, by default in a folder that sandboxes' users can enter, unlike root's home. Raises ImageError."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    default = Path("/var/cache/rayapp/images") if os.geteuid() == 0 else home / "rayapp/images"
    return Store(Path(folder).expanduser() if folder else default, max_bytes=int(max_gib * _GIB)).prepare()


def _write(path: Path, value: Mapping[str, Any]) -> None:
    with aside(path) as temporary:
        temporary.write_text(json.dumps(value))


def _sync(folder: Path) -> None:
    """Sync the folder's file system: for thousands of files this is faster than fsync."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        kernel.syncfs(descriptor)
    finally:
        os.close(descriptor)
