"""Opens a storage by its URI: a `LocalStorage` (a folder on a disk or a network file system), or one of `REMOTE`."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from rayapp.core.errors import StorageCorruptError, StorageError, StorageNotFoundError
from rayapp.core.files import Location, check_key, fsync, is_aside, storage_errors, stored
from rayapp.core.names import load_extra
from rayapp.storage.base import MAX_SMALL_BYTES, ObjectInfo, Storage, hash_bytes, hash_file
from rayapp.storage.settings import S3Settings, settings_from_environment


class LocalStorage:
    """`Storage` on a file system, which stores no checksums: a read is verified only if the caller gives one."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def uri(self) -> str:
        return str(self._root)

    async def put_bytes(self, data: bytes, key: str, *, if_absent: bool = False) -> ObjectInfo:
        def write() -> None:
            with stored(self._path(key), if_absent=if_absent) as temporary:
                temporary.write_bytes(data)

        await asyncio.to_thread(write)
        return ObjectInfo(key=key, num_bytes=len(data), sha256=hash_bytes(data))

    async def put_file(self, path: Path, key: str) -> ObjectInfo:
        return await self._copy(path, self._path(key), key)

    async def get_bytes(self, key: str, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            with storage_errors(path), path.open("rb") as file:
                return file.read(max_bytes + 1)

        data = await asyncio.to_thread(read)
        if len(data) > max_bytes:
            raise StorageError(f"{path} is larger than the limit of {max_bytes} bytes")
        return data

    async def get_file(self, key: str, path: Path, *, sha256: str = "") -> ObjectInfo:
        return await self._copy(self._path(key), path, key, sha256=sha256)

    async def info(self, key: str) -> ObjectInfo | None:
        path = self._path(key)
        try:
            with storage_errors(path):
                num_bytes = path.stat().st_size
        except StorageNotFoundError:
            return None
        return ObjectInfo(key=key, num_bytes=num_bytes) if path.is_file() else None

    async def exists(self, key: str) -> bool:
        return await self.info(key) is not None

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for info in await asyncio.to_thread(lambda: sorted(self._walk(prefix), key=lambda found: found.key)):
            yield info

    async def delete(self, key: str) -> None:
        path = self._path(key)
        with storage_errors(path):
            path.unlink(missing_ok=True)

    async def check(self) -> None:
        """Check that the folder can be used, by creating it and a file in it."""

        def probe() -> None:
            with stored(self._root / "probe") as temporary:
                temporary.touch()
            (self._root / "probe").unlink(missing_ok=True)

        await asyncio.to_thread(probe)

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _walk(self, prefix: str) -> Iterator[ObjectInfo]:
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = Path(folder) / name
                key = path.relative_to(self._root).as_posix()
                if not key.startswith(prefix) or is_aside(name):
                    continue
                with suppress(FileNotFoundError):  # another process may delete it at any time
                    if stat.S_ISREG((facts := path.stat()).st_mode):
                        yield ObjectInfo(key=key, num_bytes=facts.st_size)

    async def _copy(self, source: Path, target: Path, key: str, *, sha256: str = "") -> ObjectInfo:
        with storage_errors(source):
            before = await hash_file(source)
        with stored(target) as temporary:
            await asyncio.to_thread(_copy_to_disk, source, temporary)
            found = await hash_file(temporary)
            if found != before or (sha256 and found != sha256):
                raise StorageCorruptError(
                    f"{source}: its SHA-256 is {found[:12]}…, not {(sha256 or before)[:12]}…: the file is "
                    "damaged, or changed while it was copied"
                )
            num_bytes = temporary.stat().st_size
        return ObjectInfo(key=key, num_bytes=num_bytes, sha256=found)


def _copy_to_disk(source: Path, target: Path) -> None:
    with storage_errors(source):
        shutil.copyfile(source, target)
    fsync(target)  # sync here, in a thread, because `stored` would do it on the event loop


REMOTE = {"s3": "s3.storage:opened"}  # by the scheme of its URIs


@asynccontextmanager
async def open_storage(uri: str, *, settings: S3Settings | None = None) -> AsyncIterator[Storage]:
    """Open the folder at `uri`, a path or s3://bucket/prefix, for the length of the block. `settings` None: from the
    environment. `check` finds out whether the storage answers."""
    location = Location.parse(uri)
    if not location.is_remote:
        yield LocalStorage(Path(location.key))
        return
    async with load_extra(REMOTE["s3"])(location, settings or settings_from_environment()) as storage:
        yield storage
