"""Sandboxes straight from a provider, without the pool: for `rayapp score`, the CLI and small scripts.

A sandbox is created per lease and killed after it. Where the provider's quota is reached, a lease waits for another of
this source to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rayapp.config.sandbox import SandboxConfig
from rayapp.core.errors import SandboxDeadlineError, SandboxQuotaError
from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.local.provider import LocalProvider

LEASE_TTL_S = 3600.0
"""The provider ends a sandbox after this long, should this process die without doing so."""


class DirectSandboxSource:
    """See `rayapp.core.protocols.SandboxSource`. Example: `async with source.lease(spec, timeout_s=60) as sandbox:`."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider
        self._released = asyncio.Condition()

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> DirectLease:
        """A sandbox for the length of an `async with` block, waiting at most timeout_s for it."""
        return DirectLease(self._provider, self._released, spec, timeout_s)


class DirectLease:
    """See `rayapp.core.protocols.SandboxLease`."""

    def __init__(
        self, provider: SandboxProvider, released: asyncio.Condition, spec: SandboxSpec, timeout_s: float
    ) -> None:
        self._provider = provider
        self._released = released
        self._spec = spec
        self._timeout_s = timeout_s
        self._sandbox: Sandbox | None = None

    async def __aenter__(self) -> Sandbox:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._sandbox = await self._create()
        except TimeoutError:
            raise SandboxDeadlineError(f"no sandbox was free within {self._timeout_s:g} s") from None
        return self._sandbox

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.shield(self._release())

    async def _create(self) -> Sandbox:
        async with self._released:
            while True:
                try:
                    return await self._provider.create(
                        self._spec, labels={}, ttl_s=LEASE_TTL_S, timeout_s=self._timeout_s
                    )
                except SandboxQuotaError:
                    await self._released.wait()

    async def _release(self) -> None:
        if self._sandbox is not None:
            sandbox, self._sandbox = self._sandbox, None
            try:
                await sandbox.kill()
            finally:
                async with self._released:
                    self._released.notify()


@asynccontextmanager
async def open_direct(config: SandboxConfig) -> AsyncIterator[DirectSandboxSource]:
    """A source over a local provider of this configuration; everything is ended on the way out."""
    provider = LocalProvider(allow_unisolated=config.allow_unisolated)
    try:
        yield DirectSandboxSource(provider)
    finally:
        await asyncio.shield(provider.close())
