"""`rayapp sandbox reap`: end what runs left at a provider. Called by `rayapp.cli.sandbox.command` only.

which providers: a config's, or those whose key is in the environment
which sandboxes: of one run (--run), or of every run with this key
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence

from rayapp.config.sandbox import DaytonaConfig, E2BConfig, SandboxConfig
from rayapp.core.errors import InputError, SandboxConfigError
from rayapp.core.terminal import visible
from rayapp.sandbox.leases import RemoteProvider
from rayapp.sandbox.pool.reaper import Reaped, labels_to_reap, reap
from rayapp.sandbox.providers.table import listing_providers

KINDS = ("e2b", "daytona")
EXIT_LEFT, EXIT_CONFIG = 1, 2


def reap_command(*, run: str | None, kinds: Sequence[str], config: SandboxConfig | None, dry_run: bool) -> int:
    """End sandboxes: one line each on standard output, failures on standard error.

    Returns:
        0: nothing is left; 1: something may be; 2: a key or an endpoint is wrong.
    Raises:
        InputError: a provider that is not known.
        SandboxConfigError: there is no provider to ask, or its key or package is not there.
    """
    providers = listing_providers(_sections(kinds, config))
    return asyncio.run(_reap(providers, labels_to_reap(run), dry_run=dry_run))


def _sections(kinds: Sequence[str], config: SandboxConfig | None) -> SandboxConfig:
    """The sandbox section with only the providers to ask."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(
            f"provider {unknown[0]!r} keeps no list that outlives its sandboxes' maker; there are: {', '.join(KINDS)}"
        )
    found = config.providers if config is not None else _defaults(kinds)
    listed = [section for section in found if isinstance(section, E2BConfig | DaytonaConfig)]
    chosen = [section for section in listed if not kinds or section.type in kinds]
    if not chosen:
        raise SandboxConfigError(_nothing_to_ask(kinds, config))
    return SandboxConfig(providers=tuple(chosen))


def _defaults(kinds: Sequence[str]) -> list[E2BConfig | DaytonaConfig]:
    """Providers with default settings: those that were named, else those whose key is set."""
    sections = (E2BConfig(), DaytonaConfig())
    return [section for section in sections if section.type in kinds or os.environ.get(section.api_key_env)]


def _nothing_to_ask(kinds: Sequence[str], config: SandboxConfig | None) -> str:
    if config is None:
        return (
            "there is no provider to ask: set E2B_API_KEY or DAYTONA_API_KEY, name one with --provider, or name the "
            "run's config with --config. Local sandboxes end with the process that made them."
        )
    wanted = " or ".join(kinds or KINDS)
    return f"the config has no {wanted} provider: of the others nothing outlives the run that made it"


async def _reap(providers: Mapping[str, RemoteProvider], labels: Mapping[str, str], *, dry_run: bool) -> int:
    found = []
    try:
        async for each in reap(providers, labels, dry_run=dry_run):
            print(
                visible(_line(each, dry_run=dry_run)), file=sys.stdout if each.error is None else sys.stderr, flush=True
            )
            found.append(each)
    finally:
        await asyncio.gather(*(provider.close() for provider in providers.values()))
    if not found:
        print(f"nothing to end at {', '.join(providers)}", file=sys.stderr)
    errors = [each.error for each in found if each.error is not None]
    if any(isinstance(error, SandboxConfigError) for error in errors):
        return EXIT_CONFIG
    return EXIT_LEFT if errors else 0


def _line(each: Reaped, *, dry_run: bool) -> str:
    if not each.sandbox_id:
        return f"{each.provider}: can't be listed: {each.error}"
    if each.error is not None:
        return f"{each.provider} {each.sandbox_id} not ended: {each.error}"
    return f"{each.provider} {each.sandbox_id} {'would be ended' if dry_run else 'ended'}"
