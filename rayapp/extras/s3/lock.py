"""The lock on a run folder in object storage: a chain of small objects made with conditional create.

    locks/000001.json  {owner, host, beat, released: true}       the first run, ended
    locks/000002.json  {owner, host, beat, released: false}      the holder: the highest number

The run that creates the next number holds the lock; it writes a new `beat` every ten seconds. A new run takes over when
the holder has released the lock, was a process of this machine that is gone, or has not beaten for a minute by the new
run's clock. A holder that finds a number above its own stops at its next beat.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from rayapp.core.errors import (
    RunFolderError,
    StorageCorruptError,
    StorageError,
    StorageExistsError,
    StorageNotFoundError,
)
from rayapp.storage.base import Storage

log = logging.getLogger(__name__)
LOCKS = "locks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    owner: str
    host: str
    boot: str  # Id of the machine's boot and the process namespace: process ids are unique only within both.
    pid: int
    beat: int = 0
    released: bool = False

    @property
    def is_free(self) -> bool:
        """Return whether it was released, or its holder was a process of this machine that has ended."""
        return self.released or (self.boot == _boot() and not Path(f"/proc/{self.pid}").exists())

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.owner else "an unknown process"

    @classmethod
    def unreadable(cls, content: bytes) -> Holder:
        """Make the holder of a lock object that can't be read: it holds, and has beaten if the content changes."""
        return cls(owner="", host=hashlib.sha256(content).hexdigest(), boot="", pid=0)


class RunLock:
    """The lock that this process holds."""

    def __init__(self, number: int, holder: Holder) -> None:
        self.number, self._holder = number, holder
        self.lost = ""  # Reason why the folder is lost; empty while it is held.

    async def beat(self, storage: Storage, *, released: bool = False) -> None:
        """Write a sign of life, or the release, unless another run took over. Raises StorageError."""
        above, own = await _look(storage, self.number + 1), await _look(storage, self.number)
        taker = above or (own if own and own.owner else None)  # a damaged lock of its own is written again
        if taker and taker.owner != self._holder.owner:
            self.lost = (
                f"{storage.uri} was taken over by {taker}, because this run didn't renew its lock in time, or started "
                "at the same moment. This run stops; its files stay on this machine."
            )
        else:
            self._holder = replace(self._holder, beat=self._holder.beat + 1, released=released)
            await storage.put_bytes(_dump(self._holder), _key(self.number))

    async def beat_for_ever(self, storage: Storage, every_s: float) -> None:
        while not self.lost:
            await asyncio.sleep(every_s)
            with suppress(StorageError):  # the uploads will report the same error
                await self.beat(storage)


async def acquire(storage: Storage, *, lease_s: float, settle_s: float) -> RunLock:
    """Become the only writer of the folder, waiting for a lease to end. Raises RunFolderError: another run is alive."""
    while True:
        names = [info.key.rpartition("/")[2].removesuffix(".json") async for info in storage.list(f"{LOCKS}/")]
        number = max((int(name) for name in names if name.isdigit()), default=0)
        if number:
            await _wait_until_free(storage, number, lease_s)
        holder = Holder(owner=uuid.uuid4().hex, host=socket.gethostname(), boot=_boot(), pid=os.getpid())
        with suppress(StorageExistsError):  # another run made this number first: check that run's lock
            await storage.put_bytes(_dump(holder), _key(number + 1), if_absent=True)
            # Stores without conditional create let the last writer win: look again after a moment.
            await asyncio.sleep(settle_s)
            if await _look(storage, number + 1) == holder:
                return RunLock(number + 1, holder)


async def _wait_until_free(storage: Storage, number: int, lease_s: float) -> None:
    """Wait until the lock is free or its lease has ended. An unreadable lock counts as held."""
    first = now = await _look(storage, number)
    if now and not now.is_free:
        log.warning("%s is held by %s; waiting up to %g s for a sign of life", storage.uri, now, lease_s)
    deadline = time.monotonic() + lease_s
    while now and not now.is_free and time.monotonic() < deadline:
        if now != first:
            raise RunFolderError(
                f"{storage.uri} is in use by the run of {now}, which still renews its lock. Wait for that run to end, "
                "stop it, or choose another run.name."
            )
        await asyncio.sleep(min(2.0, lease_s / 4))
        now = await _look(storage, number)


async def _look(storage: Storage, number: int) -> Holder | None:
    try:
        content = await storage.get_bytes(_key(number))
    except StorageNotFoundError:
        return None
    except StorageCorruptError as error:
        return Holder.unreadable(str(error).encode())  # with the checksum that was found
    try:
        holder = Holder(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return Holder.unreadable(content)
    values = (getattr(holder, field.name) for field in fields(Holder))
    return holder if [*map(type, values)] == [str, str, str, int, int, bool] else Holder.unreadable(content)


def _key(number: int) -> str:
    return f"{LOCKS}/{number:06d}.json"


def _dump(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _boot() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
