"""Ends the sandboxes of dead runs, by their labels: for `rayapp sandbox reap`, and when a run's heartbeats stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

from rayapp.core.errors import SandboxError
from rayapp.core.protocols import SandboxProvider
from rayapp.sandbox.leases import APP_LABEL, APP_NAME, RUN_LABEL

_ROUNDS = 20
_MAX_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """Result for one sandbox, or for a provider whose sandboxes could not be listed."""

    provider: str
    sandbox_id: str  # empty in a result for a provider
    ended: bool
    error: SandboxError | None = None


def labels_to_reap(run_name: str | None) -> dict[str, str]:
    """Return the labels of one run's sandboxes; without a name, of all sandboxes that rayapp made."""
    return {RUN_LABEL: run_name} if run_name is not None else {APP_LABEL: APP_NAME}


async def reap(
    providers: Mapping[str, SandboxProvider], labels: Mapping[str, str], *, dry_run: bool = False
) -> AsyncIterator[Reaped]:
    """End every sandbox with these labels, and yield the results. A failing provider is a result, not an exception."""
    for name, provider in providers.items():
        try:
            found = [sandbox_id async for sandbox_id in provider.list(labels)]
        except SandboxError as error:
            yield Reaped(provider=name, sandbox_id="", ended=False, error=error)
            continue
        for sandbox_id in found:
            yield await _reap_one(name, provider, sandbox_id, dry_run=dry_run)


async def _reap_one(name: str, provider: SandboxProvider, sandbox_id: str, *, dry_run: bool) -> Reaped:
    if dry_run:
        return Reaped(provider=name, sandbox_id=sandbox_id, ended=False)
    try:
        await provider.kill(sandbox_id)
    except SandboxError as error:
        return Reaped(provider=name, sandbox_id=sandbox_id, ended=False, error=error)
    return Reaped(provider=name, sandbox_id=sandbox_id, ended=True)


@dataclass(slots=True, eq=False, repr=False)
class Reaper:
    """Watches one run, and ends the run's sandboxes when the run dies."""

    providers: Mapping[str, SandboxProvider]  # closed when `watch` ends
    _: KW_ONLY
    grace_s: float  # without a heartbeat; a living run must never pause for so long
    pause_s: float = 1.0  # after the first sweep; doubles after each
    clock: Callable[[], float] = time.monotonic
    _labels: dict[str, str] = field(default_factory=dict)
    _heard_at: float = field(init=False)
    _is_dismissed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._heard_at = self.clock()

    def beat(self, labels: Mapping[str, str]) -> None:
        """Record a heartbeat of the run. It sends one, with its sandboxes' labels, before the first sandbox."""
        self._labels = dict(labels)
        self._heard_at = self.clock()

    def dismiss(self) -> None:
        """Record that the run has ended normally, so that `watch` ends without a sweep."""
        self._is_dismissed.set()

    async def watch(self) -> int:
        """Wait until the run ends normally, or is dead and its sandboxes are ended. Return the number of ended
        sandboxes."""
        ended: set[str] = set()
        try:
            while await self._falls_silent():
                await self._sweep(ended)
                if self._is_silent:
                    break
        finally:
            await asyncio.gather(*(provider.close() for provider in self.providers.values()))
        return len(ended)

    @property
    def _left_s(self) -> float:
        return self._heard_at + self.grace_s - self.clock()

    @property
    def _is_silent(self) -> bool:
        return self._left_s <= 0 and not self._is_dismissed.is_set()

    async def _falls_silent(self) -> bool:
        """Return True if the heartbeats stopped, False if the run is dismissed."""
        while not self._is_dismissed.is_set() and (left_s := self._left_s) > 0:
            try:
                async with asyncio.timeout(max(0.01, left_s)):
                    await self._is_dismissed.wait()
            except TimeoutError:
                continue
        return not self._is_dismissed.is_set()

    async def _sweep(self, ended: set[str]) -> None:
        """End the run's sandboxes in several rounds, as a failing provider may work in a minute. If heartbeats start
        again, the run was only paused (debugger, suspended machine): it keeps the rest."""
        pause_s = self.pause_s
        # A run without labels has made no sandbox, and without labels the sweep would match the sandboxes of all users.
        for _ in range(_ROUNDS if self._labels else 0):
            found = [each async for each in reap(self.providers, self._labels)]
            ended.update(each.sandbox_id for each in found if each.ended)
            if not found or not self._is_silent:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, pause_s * 2)
