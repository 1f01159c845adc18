"""Who may write a run folder in object storage: one process, by a chain of small objects made with conditional create.

    locks/000001.json  {owner, host, beat, released: true}       the first run, ended
    locks/000002.json  {owner, host, beat, released: false}      the one that holds it: the highest number

The creation of the next number decides. Some stores let two creators through that come at once (Swift does): there the
object that is left says who it is, which each of them reads after a moment and again before every beat. The holder
writes a new `beat` every ten seconds. Who comes next takes over when the holder has released it, is a process of this
machine that is gone, or has not beaten for a minute, by the watcher's own clock. A holder that finds a number above its
own, or another's name under it, has lost the folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rayapp.errors import RunFolderError, StorageCorruptError, StorageExistsError
from rayapp.mirror.layout import LOCKS
from rayapp.storage.base import Storage

log = logging.getLogger(__name__)
BEAT_EVERY_S, LEASE_S, POLL_S, SETTLE_S = 10.0, 60.0, 2.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What a lock object says."""

    owner: str
    host: str
    boot: str
    """Names the boot of the machine and the process namespace: a process id means nothing outside of it."""
    pid: int
    started: int
    """Clock ticks from the machine's start to the process's: process ids are used again."""
    beat: int = 0
    released: bool = False

    @classmethod
    def me(cls) -> Holder:
        pid = os.getpid()
        return cls(owner=uuid.uuid4().hex, host=socket.gethostname(), boot=_boot(), pid=pid, started=_started(pid) or 0)

    @property
    def is_gone(self) -> bool:
        """True if it was a process of this machine and namespace that has ended. False says nothing."""
        return bool(self.boot) and self.boot == _boot() and _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """The lock that this process holds; make one with `acquire`."""

    def __init__(self, generation: int, holder: Holder) -> None:
        self.generation = generation
        self.lost = ""
        """Why the folder is no longer ours; empty while it is."""
        self._holder = holder

    async def beat(self, storage: Storage) -> None:
        """Say that we live, and look whether somebody took over. Raises StorageError."""
        taker = await self._taker(storage)
        if taker is not None:
            self.lost = (
                f"{storage.uri} was taken over by {taker}, because this run gave no sign of life for {LEASE_S:g} s or "
                "began at the same moment. This one stops; its files stay where they are on this machine."
            )
            return
        self._holder = replace(self._holder, beat=self._holder.beat + 1)
        await storage.put_bytes(_dump(self._holder), _key(self.generation))

    async def _taker(self, storage: Storage) -> Holder | None:
        if await storage.exists(_key(self.generation + 1)):
            return await _read(storage, self.generation + 1) or self._holder
        there = await _read(storage, self.generation)
        return there if there is not None and there.owner != self._holder.owner else None

    async def release(self, storage: Storage) -> None:
        """Let the next run in at once. Raises StorageError."""
        if not self.lost:
            await storage.put_bytes(_dump(replace(self._holder, released=True)), _key(self.generation))


async def acquire(
    storage: Storage, *, lease_s: float = LEASE_S, poll_s: float = POLL_S, settle_s: float = SETTLE_S
) -> RunLock:
    """Become the only writer of the folder, waiting for a lease to end if need be.

    Raises:
        RunFolderError: another run lives in it.
        StorageError: the storage can't be asked.
    """
    while True:
        generation = await last_generation(storage)
        if generation:
            await _wait_until_free(storage, generation, lease_s=lease_s, poll_s=poll_s)
        holder = Holder.me()
        try:
            await storage.put_bytes(_dump(holder), _key(generation + 1), if_absent=True)
        except StorageExistsError:
            continue  # somebody was faster: look at them
        await asyncio.sleep(settle_s)
        there = await _read(storage, generation + 1)
        if there is not None and there.owner == holder.owner:
            return RunLock(generation + 1, holder)


async def last_generation(storage: Storage) -> int:
    """The highest lock number there; 0 where no run has ever been."""
    names = [info.key.rpartition("/")[2] async for info in storage.list(f"{LOCKS}/")]
    return max((int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdigit()), default=0)


async def _wait_until_free(storage: Storage, generation: int, *, lease_s: float, poll_s: float) -> None:
    first = await _read(storage, generation)
    if first is None or first.released or first.is_gone:
        return
    log.warning(
        "%s is held by %s; waiting up to %g s for a sign of life before taking over", storage.uri, first, lease_s
    )
    deadline = time.monotonic() + lease_s
    while time.monotonic() < deadline:
        await asyncio.sleep(poll_s)
        now = await _read(storage, generation)
        if now is None or now.released:
            return
        if now.beat != first.beat:
            raise RunFolderError(
                f"{storage.uri} is in use by the run of {now}, which is alive. Wait for it, stop it, or choose another "
                "run.name."
            )


async def _read(storage: Storage, generation: int) -> Holder | None:
    """None for one that says nothing readable: then only its number counts."""
    try:
        return Holder(**json.loads(await storage.get_bytes(_key(generation))))
    except (ValueError, TypeError, StorageCorruptError):
        return None


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
    """None where there is no such process."""
    try:
        # The name of a process may hold spaces and brackets; what follows its last bracket has neither.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
