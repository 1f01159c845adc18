"""Ends the sandboxes of dead runs, by their labels, for `rayapp sandbox reap`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from rayapp.core.errors import SandboxError
from rayapp.core.protocols import SandboxProvider
from rayapp.sandbox.leases import APP_LABEL, APP_NAME, RUN_LABEL


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
