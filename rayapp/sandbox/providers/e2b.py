"""E2B: its cloud, a self-hosted E2B, or an OpenKruise/ACK sandbox-manager.

    E2BProvider -> ServiceProvider (deadlines, late answers) -> SdkService    (dialect e2b: the SDK's control plane)
                                                            '-> KruiseService (dialect kruise: see `e2b_channel.py`)

Both reach the inside of a sandbox through the SDK (`e2b_channel.py`). docs/sandbox-providers.md lists which SDK
versions fit which server.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import e2b
from e2b import SandboxQuery, SandboxState
from e2b.connection_config import ConnectionConfig
from e2b_code_interpreter import AsyncSandbox

from rayapp.config.sandbox import E2BConfig
from rayapp.core.errors import SandboxConfigError, SandboxError, SandboxGoneError, SandboxUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.providers.e2b_channel import E2BChannel, KruiseService, Lifecycle
from rayapp.sandbox.providers.service import E2B, ServiceProvider, error_of

_PAGE = 100
_CALL_TIMEOUT_S = 15.0
_LATE_ANSWER_S = 30.0


class E2BProvider(ServiceProvider):
    """Makes sandboxes by E2B's protocol; see `rayapp.sandbox.leases.RemoteProvider`."""

    def __init__(self, config: E2BConfig, *, api_key: str) -> None:
        service = SdkService(config, api_key) if config.dialect == "e2b" else KruiseService(config, api_key)
        super().__init__(service, answer_within_s=config.answer_within_s)


class SdkService:
    """E2B's control plane through the SDK; see `rayapp.sandbox.providers.service.Service`."""

    name = "e2b"

    def __init__(self, config: E2BConfig, api_key: str) -> None:
        self._config = config
        self._options: dict[str, Any] = {"api_key": api_key, "debug": False}
        named = {"domain": config.domain, "api_url": config.api_url, "sandbox_url": config.sandbox_url}
        self._options |= {name: value for name, value in named.items() if value}

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> Connection:
        # With this key, retries (the SDK's own, and those after a lost answer) return the same sandbox.
        key = str(uuid.uuid4())
        try:
            return await self._create(spec, labels, ttl_s, timeout_s, key)
        except SandboxUnavailableError as error:
            if type(error) is not SandboxUnavailableError:
                raise
            return await self._create(spec, labels, ttl_s, timeout_s, key)

    async def _create(
        self, spec: SandboxSpec, labels: Mapping[str, str], ttl_s: float, timeout_s: float, key: str
    ) -> Connection:
        try:
            made = await AsyncSandbox.create(
                template=self._config.template_of(spec.template) or self._config.template,
                timeout=math.ceil(ttl_s),
                metadata=dict(labels),
                envs=dict(spec.env),
                allow_internet_access=self._config.allow_internet,
                lifecycle={"on_timeout": "kill"},
                idempotency_key=key,
                # Wait past the caller's deadline: a late answer still names the sandbox to end.
                request_timeout=timeout_s + _LATE_ANSWER_S,
                **self._options,
            )
        except Exception as error:  # boundary: the SDK raises from three roots and its transports from others
            raise control_error(error, "create") from error
        return Connection(
            sandbox_id=made.sandbox_id,
            endpoint=made.sandbox_domain or "",
            # The SDK does not expose two of these fields, which a worker needs to connect to the sandbox.
            token=made._envd_access_token or "",  # noqa: SLF001
            traffic_token=made.traffic_access_token or "",
            version=str(made._envd_version),  # noqa: SLF001
        )

    async def list(self, labels: Mapping[str, str], *, timeout_s: float) -> AsyncIterator[str]:
        query = SandboxQuery(metadata=dict(labels), state=[SandboxState.RUNNING, SandboxState.PAUSED])
        pages = AsyncSandbox.list(query=query, limit=_PAGE, request_timeout=timeout_s, **self._options)
        while pages.has_next:
            try:
                found = await pages.next_items()
            except Exception as error:  # boundary: the SDK may raise many types of errors; all are converted
                raise control_error(error, "list") from error
            for info in found:
                yield info.sandbox_id

    async def kill(self, sandbox_id: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        try:
            await AsyncSandbox.kill(sandbox_id, request_timeout=timeout_s, **self._options)
        except Exception as error:  # boundary: the SDK may raise many types of errors; all are converted
            raise control_error(error, "kill") from error

    async def is_running(self, sandbox_id: str) -> bool:
        """Return True if the control plane lists the sandbox as running.

        Raises:
            SandboxError: the question could not be answered.
        """
        try:
            info = await AsyncSandbox.get_info(sandbox_id, request_timeout=_CALL_TIMEOUT_S, **self._options)
        except e2b.NotFoundException:
            return False
        except Exception as error:  # boundary: the SDK may raise many types of errors; all are converted
            raise control_error(error, "get_info") from error
        return bool(info.state == SandboxState.RUNNING)

    async def extend(self, sandbox_id: str, ttl_s: float) -> None:
        """Set the sandbox's end to ttl_s from now."""
        try:
            await AsyncSandbox.set_timeout(
                sandbox_id, math.ceil(ttl_s), request_timeout=_CALL_TIMEOUT_S, **self._options
            )
        except e2b.NotFoundException as error:
            raise SandboxGoneError(f"sandbox {sandbox_id} is gone: {error}") from None
        except Exception as error:  # boundary: the SDK may raise many types of errors; all are converted
            raise control_error(error, "set_timeout") from error

    def channel(self, connection: Connection) -> E2BChannel:
        lifecycle = Lifecycle(is_running=self.is_running, extend=self.extend, kill=self.kill)
        return E2BChannel(connection, self._sdk_config, lifecycle)

    def _sdk_config(self, headers: dict[str, str]) -> ConnectionConfig:
        return ConnectionConfig(extra_sandbox_headers=headers, **self._options)

    async def close(self) -> None:
        """Do nothing: the SDK's connections belong to the process, not to this object."""


def control_error(error: Exception, what: str) -> SandboxError:
    """Convert an exception of the SDK's control plane to a SandboxError.

    The SDK has several base classes: SandboxException, AuthenticationException, ServiceBusyException, and raw errors
    of its transports.

    Args:
        what: the call, for the message, e.g. `create`.
    """
    text = f"e2b {what}: {type(error).__name__}: {error}"[:600]
    if isinstance(error, e2b.AuthenticationException):
        return SandboxConfigError(f"{text}. Check the key in the variable that sandbox.providers[].api_key_env names")
    if isinstance(error, e2b.SandboxNotFoundException):
        return SandboxGoneError(text)
    status = 429 if isinstance(error, e2b.RateLimitException) else getattr(error, "status_code", None)
    is_late = isinstance(error, e2b.TimeoutException | TimeoutError)
    return error_of(error, text, E2B, status=status, is_late=is_late)
