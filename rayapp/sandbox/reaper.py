"""Ends the sandboxes of runs that are gone: on the command line, and by itself when a run's heartbeat stops.

    Reaper: beat, beat, beat … silence for reaper_grace_s -> sweep until nothing is listed -> done
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from rayapp.errors import SandboxError
from rayapp.protocols import SandboxProvider
from rayapp.sandbox.leases import APP_LABEL, APP_NAME, RUN_LABEL

_ROUNDS = 20
_MAX_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """One sandbox, or one provider that could not be asked."""

    provider: str
    sandbox_id: str
    ended: bool
    detail: str = ""
    """Why it was not ended, if it should have been."""


def labels_to_reap(run_name: str | None) -> dict[str, str]:
    """Of one run, or of every run of this application."""
    return {RUN_LABEL: run_name} if run_name is not None else {APP_LABEL: APP_NAME}


async def reap(
    providers: Mapping[str, SandboxProvider], labels: Mapping[str, str], *, dry_run: bool = False
) -> AsyncIterator[Reaped]:
    """End every sandbox with these labels. Never raises for a provider: what failed is said."""
    for name, provider in providers.items():
        try:
            found = [sandbox_id async for sandbox_id in provider.list(labels)]
        except SandboxError as error:
            yield Reaped(provider=name, sandbox_id="", ended=False, detail=f"can't be listed: {error}")
            continue
        for sandbox_id in found:
            yield await _reap_one(name, provider, sandbox_id, dry_run=dry_run)


async def _reap_one(name: str, provider: SandboxProvider, sandbox_id: str, *, dry_run: bool) -> Reaped:
    if dry_run:
        return Reaped(provider=name, sandbox_id=sandbox_id, ended=False)
    try:
        await provider.kill(sandbox_id)
    except SandboxError as error:
        return Reaped(provider=name, sandbox_id=sandbox_id, ended=False, detail=str(error))
    return Reaped(provider=name, sandbox_id=sandbox_id, ended=True)


class Reaper:
    """Watches one run.

    Args:
        providers: remote ones, by name; closed when done.
        run_name: whose sandboxes to end.
        grace_s: silence that means the run is dead. Longer than any pause of a living run.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        providers: Mapping[str, SandboxProvider],
        run_name: str,
        *,
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._providers = dict(providers)
        self._labels = labels_to_reap(run_name)
        self._grace_s = grace_s
        self._clock = clock
        self._heard_at = clock()
        self._is_dismissed = asyncio.Event()

    def beat(self) -> None:
        """The run lives."""
        self._heard_at = self._clock()

    def dismiss(self) -> None:
        """The run has ended in order: there is nothing to do any more."""
        self._is_dismissed.set()

    async def watch(self) -> int:
        """Returns when the run has ended in order, or is dead and its sandboxes are gone: then how many were ended."""
        while (left_s := self._heard_at + self._grace_s - self._clock()) > 0:
            try:
                async with asyncio.timeout(max(0.01, left_s)):
                    await self._is_dismissed.wait()
            except TimeoutError:
                continue
            await self._close()
            return 0
        try:
            return await self._sweep()
        finally:
            await self._close()

    async def _sweep(self) -> int:
        """A provider that fails now may work in a minute, so try for a while; their own time limits come last."""
        num_ended, pause_s = 0, 1.0
        for _ in range(_ROUNDS):
            found = [each async for each in reap(self._providers, self._labels)]
            num_ended += sum(each.ended for each in found)
            if not found:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_PAUSE_S, pause_s * 2)
        return num_ended

    async def _close(self) -> None:
        await asyncio.gather(*(provider.close() for provider in self._providers.values()))
