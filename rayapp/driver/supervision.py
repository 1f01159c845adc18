"""Supervises the processes of a run: restarts those that are gone or hang, and restores their state before use.

    up --ping fails--> down --kill, revive (process, engine, current weights)--> up

Learners are not members: when one dies, all are started again from the last checkpoint. A process that is being started
has the longer deadline `revive_timeout_s`: on a busy machine it would be killed again and again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rayapp.config.sections import RecoverySection
from rayapp.core.errors import (
    DeadlineError,
    ProcessDiedError,
    ProcessUnavailableError,
    RayappError,
    RestartsUsedUpError,
)

log = logging.getLogger(__name__)
PING_EVERY_S = 2.0
BIRTH_POLL_S = 0.1


class Watched(Protocol):
    """Process that can be replaced while the other processes continue. Every method raises RayappError on failure."""

    @property
    def name(self) -> str: ...

    async def incarnation(self, timeout_s: float) -> str:
        """Return an id of this start of the process; it differs after every restart."""
        ...

    async def ping(self, timeout_s: float) -> str:
        """Return the `incarnation` if the process can do its work now."""
        ...

    async def kill(self) -> None:
        """End the process, even if it hangs, so that Ray starts it again. Idempotent."""
        ...

    async def revive(self) -> None:
        """Restore the state of a process that has just been restarted."""
        ...


async def _at_once(name: str) -> None:
    return


class Supervisor:
    """Watches and restarts the members, all of them up. `may_start` returns when the GPU has room for one; the deadline
    does not include this wait."""

    def __init__(
        self,
        members: Sequence[Watched],
        recovery: RecoverySection,
        *,
        revive_timeout_s: float,
        ping_every_s: float = PING_EVERY_S,
        report: Callable[[str], None] = lambda text: None,
        may_start: Callable[[str], Awaitable[None]] = _at_once,
    ) -> None:
        self._members = {member.name: member for member in members}
        self._incarnations = dict.fromkeys(self._members, "")
        self._recovery = recovery
        self._revive_timeout_s, self._ping_every_s = revive_timeout_s, ping_every_s
        self._report = report
        self._may_start = may_start
        self._locks = {name: asyncio.Lock() for name in self._members}
        self._replacing: set[asyncio.Task[None]] = set()
        self._down: set[str] = set()
        self.restarts: Counter[str] = Counter()  # in the run, by the member's name
        self.seconds_down = 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the members during a block. RestartsUsedUpError from the block: a member died too often."""
        for name, member in self._members.items():
            self._incarnations[name] = await member.ping(self._revive_timeout_s)
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(self._watch(name), name=f"watch {name}") for name in self._members]
            try:
                yield
            finally:
                for task in (*watches, *self._replacing):
                    task.cancel()

    async def _watch(self, name: str) -> None:
        while True:
            await asyncio.sleep(self._ping_every_s)
            await self._check(name)

    async def settled(self) -> None:
        """Restart the members that are gone, and wait until every member answers. Call it after any failed call."""
        await asyncio.gather(*(self._owned(self._check(name), name) for name in self._members))

    def is_up(self, name: str) -> bool:
        return name not in self._down

    def incarnation(self, name: str) -> str:
        """Return the incarnation of a member that is up; empty while it is being replaced."""
        return self._incarnations[name] if self.is_up(name) else ""

    async def condemn(self, name: str, incarnation: str, reason: str) -> None:
        """Replace a member that answers but can't be used, unless the failed `incarnation` is gone (or empty)."""
        await self._owned(self._condemn(name, incarnation, reason), name)

    async def _condemn(self, name: str, incarnation: str, reason: str) -> None:
        async with self._locks[name]:
            if incarnation and incarnation == self._incarnations[name]:
                await self._replace(self._members[name], reason, must_kill=True)

    async def _owned(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Await work that continues if the caller is cancelled: a half-replaced member would be lost, or count as
        up."""
        task = asyncio.create_task(work, name=f"replace {name}")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)
        await asyncio.shield(task)

    async def _check(self, name: str) -> None:
        # A member is checked by one caller at a time: a second caller waits, and then finds the member replaced.
        async with self._locks[name]:
            reason, must_kill = await self._why_down(self._members[name])
            if reason:
                await self._replace(self._members[name], reason, must_kill=must_kill)

    async def _why_down(self, member: Watched) -> tuple[str, bool]:
        """Return why the member is down (empty: it is up), and whether its old process must be killed."""
        known = self._incarnations[member.name]
        try:
            if await member.ping(self._recovery.ping_timeout_s) == known:
                return "", False
            return "its process ended and was started again.", False
        except ProcessDiedError as error:
            return str(error), False
        except DeadlineError as error:
            return str(error), True
        except RayappError as error:
            return str(error), await self._is_still(member, known)

    async def _is_still(self, member: Watched, incarnation: str) -> bool:
        try:
            return await member.incarnation(self._recovery.ping_timeout_s) == incarnation
        except RayappError as error:
            return not isinstance(error, ProcessDiedError)

    async def _replace(self, member: Watched, reason: str, *, must_kill: bool) -> None:
        self._report(f"lost {member.name}: {reason}")
        log.info("lost %s: %s", member.name, reason)  # only info: the user has seen the report
        started = time.monotonic()
        self._down.add(member.name)
        while True:
            self._count(member.name, reason)
            await self._may_start(member.name)
            try:
                async with asyncio.timeout(self._revive_timeout_s):
                    if must_kill:
                        await member.kill()
                    await self._revive(member)
                break
            except RayappError as error:
                # Check the member's process, because the error may be about another process that it called.
                reason, must_kill = str(error), await self._is_still(member, self._incarnations[member.name])
            except TimeoutError:
                reason, must_kill = f"it was not ready again within {self._revive_timeout_s:g} s.", True
        self._down.discard(member.name)
        seconds = time.monotonic() - started
        self.seconds_down += seconds
        self._report(f"replaced {member.name} after {seconds:.1f} s (restart {self.restarts[member.name]})")

    async def _revive(self, member: Watched) -> None:
        known = self._incarnations[member.name]
        # Ray has no event for an actor's restart, so poll.
        while (born := await self._born(member)) in ("", known):  # noqa: ASYNC110
            await asyncio.sleep(BIRTH_POLL_S)
        self._incarnations[member.name] = born
        await member.revive()

    async def _born(self, member: Watched) -> str:
        try:
            return await member.incarnation(self._recovery.ping_timeout_s)
        except (ProcessUnavailableError, DeadlineError):
            # The process has not started yet, or is still importing; `revive_timeout_s` limits this wait.
            return ""

    def _count(self, name: str, reason: str) -> None:
        if self.restarts[name] >= self._recovery.max_restarts:
            raise RestartsUsedUpError(
                f"{name} was lost {self.restarts[name] + 1} times, and recovery.max_restarts is "
                f"{self._recovery.max_restarts}. Last reason: {reason} Find out why in Ray's logs of {name} "
                "(dashboard, Actors), then start the run again: it continues from its last checkpoint."
            )
        self.restarts[name] += 1

    def metrics(self) -> dict[str, float]:
        return {"recovery/restarts": float(self.restarts.total()), "recovery/seconds_down": self.seconds_down}
