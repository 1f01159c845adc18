"""Daytona through its SDK. Called by `table.py` only.

    DaytonaProvider -> ServiceProvider (deadlines, late answers) -> DaytonaService (control plane) -> DaytonaChannel

Sandboxes are ephemeral (deleted when they stop), have a time to live that counts whatever their state, and no network
unless the configuration says so. Intervals there are whole minutes: ours are rounded up.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from rayapp.config.sandbox import DaytonaConfig
from rayapp.core.errors import SandboxError, SandboxGoneError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.providers.daytona_channel import DaytonaChannel, daytona_error, sdk
from rayapp.sandbox.providers.service import ServiceProvider

_CALL_TIMEOUT_S = 15.0
_LATE_ANSWER_S = 30.0
_ENDED = ("destroyed", "destroying")


class DaytonaProvider(ServiceProvider):
    """See `rayapp.sandbox.leases.RemoteProvider`."""

    def __init__(self, config: DaytonaConfig, *, api_key: str) -> None:
        super().__init__(DaytonaService(config, api_key), answer_within_s=config.answer_within_s)


class DaytonaService:
    """See `rayapp.sandbox.providers.service.Service`."""

    name = "daytona"

    def __init__(self, config: DaytonaConfig, api_key: str) -> None:
        self._config = config
        self._api_key = api_key
        self._client: Any = None

    def client(self) -> Any:
        """The SDK's client; made on the first call, because it belongs to the event loop that runs then."""
        if self._client is None:
            named = {"api_url": self._config.api_url, "target": self._config.target}
            given = {name: value for name, value in named.items() if value}
            self._client = sdk().AsyncDaytona(sdk().DaytonaConfig(api_key=self._api_key, **given))
        return self._client

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> Connection:
        # Past the caller's deadline, so that a late answer is heard and its sandbox ended.
        waited_s = timeout_s + _LATE_ANSWER_S
        try:
            made = await self.client().create(self._params(spec, labels, ttl_s), timeout=waited_s)
        except Exception as error:  # boundary: the SDK, its generated clients and aiohttp raise many things; all mapped
            await self._end_half_made(error)
            raise daytona_error(error, "create") from error
        return Connection(sandbox_id=made.id)

    def _params(self, spec: SandboxSpec, labels: Mapping[str, str], ttl_s: float) -> Any:
        config = self._config
        minutes = max(1, math.ceil(ttl_s / 60))
        common: dict[str, Any] = {
            "language": "python",
            "labels": dict(labels),
            "env_vars": dict(spec.env),
            "ephemeral": True,
            "ttl_minutes": minutes,
            "auto_stop_interval": minutes,
            "queue_timeout": max(1, math.ceil(_LATE_ANSWER_S / 60)),
            "network_block_all": not config.allow_internet,
        }
        wanted = config.template_of(spec.template)
        if config.image or _is_image(wanted):
            resources = sdk().Resources(cpu=config.cpu, memory=config.memory_gib)
            return sdk().CreateSandboxFromImageParams(image=wanted or config.image, resources=resources, **common)
        return sdk().CreateSandboxFromSnapshotParams(snapshot=wanted or config.snapshot or None, **common)

    async def _end_half_made(self, error: Exception) -> None:
        """A creation that timed out names the sandbox that may still come up."""
        if (sandbox_id := getattr(error, "sandbox_id", None)) is not None:
            try:
                await self.kill(str(sandbox_id))
            except SandboxError:
                # The sweep by label is next, and then its time to live.
                return

    async def list(self, labels: Mapping[str, str], *, timeout_s: float) -> AsyncIterator[str]:
        states = [state for state in sdk().SandboxState if state.value not in _ENDED]
        query = sdk().ListSandboxesQuery(labels=dict(labels), states=states)
        try:
            async for found in self.client().list(query, request_timeout=timeout_s):
                yield str(found.id)
        except Exception as error:  # boundary: as above
            raise daytona_error(error, "list") from error

    async def kill(self, sandbox_id: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        try:
            found = await self.client().get(sandbox_id, request_timeout=timeout_s)
            await found.delete(timeout=timeout_s)
        except Exception as error:  # boundary: as above
            mapped = daytona_error(error, "delete")
            if not isinstance(mapped, SandboxGoneError):
                raise mapped from error

    async def get(self, sandbox_id: str) -> Any:
        """The SDK's own object for a living sandbox.

        Raises:
            SandboxGoneError: there is none, or it has ended.
        """
        try:
            found = await self.client().get(sandbox_id, request_timeout=_CALL_TIMEOUT_S)
        except Exception as error:  # boundary: as above
            raise daytona_error(error, "get") from error
        state = str(getattr(found.state, "value", found.state))
        if state != "started":
            raise SandboxGoneError(f"sandbox {sandbox_id} is {state}")
        return found

    def channel(self, connection: Connection) -> DaytonaChannel:
        return DaytonaChannel(connection.sandbox_id, self)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _is_image(template: str) -> bool:
    """True for `org/name:tag`; names of snapshots have neither a slash nor a colon."""
    return "/" in template or ":" in template
