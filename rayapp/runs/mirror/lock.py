"""The lock on a run folder in object storage: one writer, by a chain of small objects made with conditional create.

    locks/000001.json  {owner, host, beat, released: true}       the first run, ended
    locks/000002.json  {owner, host, beat, released: false}      the holder: the highest number

The run that creates the next number holds the lock. Some stores accept two concurrent creations (Swift does); then the
object that remains decides: each creator reads it after a moment, and again before every beat. The holder writes a new
`beat` every ten seconds. A new run takes over when the holder has released the lock, was a process of this machine that
is gone, or has not beaten for a minute by the new run's clock. A holder that finds a number above its own, or another
name under its number, has lost the folder.

A holder that was paused doesn't know that it lost the folder. So each of its writes calls `fence` first. A write may
start until half a lease after the last beat that found the folder held, and must end before the lease does. Later than
that, `fence` first writes a new beat.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rayapp.core.errors import RunFolderError, StorageCorruptError, StorageError, StorageExistsError, StorageTakenError
from rayapp.runs.mirror.layout import LOCKS
from rayapp.storage.base import Storage

log = logging.getLogger(__name__)
BEAT_EVERY_S, LEASE_S, POLL_S, SETTLE_S = 10.0, 60.0, 2.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Content of a lock object."""

    owner: str
    host: str
    boot: str
    """Id of the machine's boot and the process namespace: process ids are unique only within both."""
    pid: int
    started: int
    """Clock ticks from the machine's start to the process's: process ids are reused."""
    beat: int = 0
    released: bool = False

    @classmethod
    def me(cls) -> Holder:
        pid = os.getpid()
        return cls(owner=uuid.uuid4().hex, host=socket.gethostname(), boot=_boot(), pid=pid, started=_started(pid) or 0)

    @property
    def is_gone(self) -> bool:
        """Return True if the holder was a process of this machine and namespace that has ended; False if this is
        unknown.
        """
        return bool(self.boot) and self.boot == _boot() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A lock object as last read."""

    content: bytes
    holder: Holder | None
    """Content of the object; None if it is unreadable, e.g. because a newer version wrote it."""

    @property
    def is_free(self) -> bool:
        return self.holder is not None and (self.holder.released or self.holder.is_gone)

    def __str__(self) -> str:
        return str(self.holder or "an unknown process")


class RunLock:
    """The lock that this process holds; make one with `acquire`.

    Args:
        held_since_s: time by `_now` just before its object was written.
    """

    def __init__(self, generation: int, holder: Holder, *, held_since_s: float, lease_s: float = LEASE_S) -> None:
        self.generation = generation
        self.lost = ""
        """Reason why the folder is lost; empty while it is held."""
        self._holder, self._lease_s = holder, lease_s
        self._ours_at_s = held_since_s
        """Start of the last beat that found the folder held: no other run takes it over within a lease from then."""
        self._one_at_a_time = asyncio.Lock()

    async def beat(self, storage: Storage) -> None:
        """Write a sign of life, and check whether another run took over. Raises StorageError."""
        began_s = _now()
        taker = await self._taker(storage)
        if taker is None:
            self._holder = replace(self._holder, beat=self._holder.beat + 1)
            await storage.put_bytes(_dump(self._holder), _key(self.generation))
            # Check again: a run that started during a pause of ours may have read the lock before this beat and taken
            # over since.
            taker = await self._taker(storage)
        if taker is None:
            self._ours_at_s = began_s
            return
        self.lost = (
            f"{storage.uri} was taken over by {taker}, because this run didn't renew its lock for {self._lease_s:g} s, "
            "or started at the same moment. This run stops; its files stay on this machine."
        )

    async def beat_for_ever(self, storage: Storage, every_s: float) -> None:
        """Write beats until the folder is lost or the task is cancelled."""
        while not self.lost:
            await asyncio.sleep(every_s)
            with suppress(StorageError):  # the uploads will report the same error
                await self.beat(storage)

    async def fence(self, storage: Storage) -> float:
        """Check before a write that the folder is still held.

        Args:
            storage: the run's storage, opened so that its writes don't call `fence`.
        Returns:
            Seconds within which the write must end, at least half a lease.
        Raises:
            StorageTakenError: another run has taken the folder over.
            StorageError: the storage can't be asked.
        """
        async with self._one_at_a_time:
            if not self.lost and _now() - self._ours_at_s > self._lease_s / 2:
                await self.beat(storage)
        if self.lost:
            raise StorageTakenError(self.lost)
        return self._lease_s - (_now() - self._ours_at_s)

    async def _taker(self, storage: Storage) -> str | None:
        if await storage.exists(_key(self.generation + 1)):
            return str(await _look(storage, self.generation + 1))
        there = (await _look(storage, self.generation)).holder
        return str(there) if there is not None and there.owner != self._holder.owner else None

    async def release(self, storage: Storage) -> None:
        """Release the lock, so that the next run can start at once. Raises StorageError."""
        if not self.lost and await self._taker(storage) is None:
            await storage.put_bytes(_dump(replace(self._holder, released=True)), _key(self.generation))


async def acquire(
    storage: Storage, *, lease_s: float = LEASE_S, poll_s: float = POLL_S, settle_s: float = SETTLE_S
) -> RunLock:
    """Become the only writer of the folder; wait for a lease to end if needed.

    Raises:
        RunFolderError: another run is alive in it.
        StorageError: the storage can't be asked.
    """
    while True:
        generation = await last_generation(storage)
        before = await _wait_until_free(storage, generation, lease_s=lease_s, poll_s=poll_s) if generation else None
        holder, began_s = Holder.me(), _now()
        try:
            await storage.put_bytes(_dump(holder), _key(generation + 1), if_absent=True)
        except StorageExistsError:
            continue  # another run made this number first: check that run's lock
        lock = RunLock(generation + 1, holder, held_since_s=began_s, lease_s=lease_s)
        await asyncio.sleep(settle_s)
        if before is not None and (await _look(storage, generation)).content != before.content:
            # The old holder renewed its lease before our lock was written, so wait until that lease ends.
            await _outwait(lock, storage, lease_s)
        there = (await _look(storage, generation + 1)).holder
        if there is not None and there.owner == holder.owner:
            return lock


async def _outwait(lock: RunLock, storage: Storage, lease_s: float) -> None:
    beating = asyncio.create_task(lock.beat_for_ever(storage, lease_s / 6))
    await asyncio.sleep(lease_s)
    beating.cancel()


async def last_generation(storage: Storage) -> int:
    """Return the highest lock number; 0 if there has never been a run."""
    names = [info.key.rpartition("/")[2] async for info in storage.list(f"{LOCKS}/")]
    return max((int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit()), default=0)


async def _wait_until_free(storage: Storage, generation: int, *, lease_s: float, poll_s: float) -> _Seen:
    """Return the lock as last seen, once it is free. An unreadable lock counts as held until its lease has ended."""
    now = first = await _look(storage, generation)
    if not first.is_free:
        log.warning(
            "%s is held by %s; waiting up to %g s for it to renew its lock before taking over",
            storage.uri,
            first,
            lease_s,
        )
    deadline = _now() + lease_s
    while not now.is_free and _now() < deadline:
        await asyncio.sleep(poll_s)
        now = await _look(storage, generation)
        if not now.is_free and now.content != first.content:
            raise RunFolderError(
                f"{storage.uri} is in use by the run of {now}, which still renews its lock. Wait for that run to end, "
                "stop it, or choose another run.name."
            )
    return now


async def _look(storage: Storage, generation: int) -> _Seen:
    try:
        content = await storage.get_bytes(_key(generation))
    except StorageCorruptError:
        return _Seen(b"", None)
    try:
        return _Seen(content, Holder(**json.loads(content)))
    except (ValueError, TypeError):
        return _Seen(content, None)


def _now() -> float:
    """Return seconds of a clock that continues while the machine sleeps, like other machines' clocks."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _key(generation: int) -> str:
    return f"{LOCKS}/{generation:06d}.json"


def _dump(holder: Holder) -> bytes:
    return json.dumps(asdict(holder)).encode()


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """Return the start time of a process in ticks; None if there is no such process."""
    try:
        # A process name may hold spaces and brackets; the text after its last bracket has neither.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
