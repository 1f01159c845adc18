"""Base of the providers that are remote services: deadlines and errors, which are the same for all.

    ServiceProvider (deadlines) -> Service (e2b | daytona: the calls themselves)

A sandbox whose creation was answered too late, or not at all, is ended by the next sweep of the pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxQuotaError,
    SandboxRateLimitError,
    SandboxUnavailableError,
)
from rayapp.core.types import SandboxSpec
from rayapp.extras.providers.remote import Channel, RemoteSandbox
from rayapp.sandbox.leases import Connection

T = TypeVar("T")
_PROBE_TIMEOUT_S = 10.0
_HOPELESS = (400, 401, 402, 403, 404, 405, 422)
# Exceptions of Python that an SDK raises if the server's answer has an unexpected form.
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Words of a service's message for a reached quota, and the hint for refusals that are permanent."""

    quota_words: tuple[str, ...]
    quota_statuses: tuple[int, ...]
    to_check: str


E2B = Wording(
    quota_words=("concurrent", "maximum number", "quota"),
    quota_statuses=(403, 429),
    to_check="the template, the key and the endpoint",
)
DAYTONA = Wording(
    quota_words=("quota", "limit exceeded", "limit reached", "maximum", "exceeds", "insufficient"),
    quota_statuses=(400, 402, 403),
    to_check="the snapshot, the key and the endpoint",
)


def error_of(
    error: Exception,
    text: str,
    wording: Wording,
    *,
    status: int | None,
    is_late: bool,
    wait_s: float | None = None,
) -> SandboxError:
    """Return the SandboxError for an SDK's exception.

    Args:
        status: HTTP status of the answer, if there was one.
        is_late: True if there was no answer in time.
        wait_s: pause that the service asks for.
    """
    if is_late:
        return SandboxDeadlineError(text)
    if status is None:
        return SandboxProtocolError(text) if isinstance(error, _NONSENSE) else SandboxUnavailableError(text)
    return error_of_status(status, text, wording, wait_s=wait_s)


def error_of_status(status: int, text: str, wording: Wording, *, wait_s: float | None = None) -> SandboxError:
    """Return the SandboxError for an HTTP status of the control plane."""
    if status in wording.quota_statuses and any(word in text.lower() for word in wording.quota_words):
        return SandboxQuotaError(text)
    if status == 429:
        return SandboxRateLimitError(text, wait_s)
    if status in _HOPELESS:
        return SandboxConfigError(f"{text}. Check {wording.to_check}: trying again can't help")
    return SandboxUnavailableError(text) if status == 409 or status >= 500 else SandboxProtocolError(text)


@contextmanager
def raised_as(convert: Callable[[Exception, str], SandboxError], what: str) -> Iterator[None]:
    """Raise every exception of the block as a SandboxError: SDKs, their clients and transports raise many types."""
    try:
        yield
    except SandboxError:
        raise
    except Exception as error:  # boundary: see above
        raise convert(error, what) from error


class Control(Protocol):
    async def is_running(self, sandbox_id: str) -> bool: ...

    async def extend(self, sandbox_id: str, ttl_s: float) -> None: ...

    async def kill(self, sandbox_id: str, *, timeout_s: float = ...) -> None: ...


class SdkChannel:
    """Base of the data planes that an SDK reaches, which asks the control plane what a failed call means."""

    # Errors of the SDK about code or files, which are no failures of the sandbox.
    passed: tuple[type[Exception], ...] = ()

    def __init__(self, sandbox_id: str, control: Control) -> None:
        self._id = sandbox_id
        self._control = control

    def converted(self, error: Exception, what: str) -> SandboxError:
        raise NotImplementedError

    def says_gone(self, error: Exception) -> bool:
        """Return whether the error itself says that the sandbox has ended."""
        return False

    async def extend(self, ttl_s: float, *, timeout_s: float) -> None:
        await self._control.extend(self._id, ttl_s)

    async def kill(self, *, timeout_s: float) -> None:
        await self._control.kill(self._id, timeout_s=timeout_s)

    async def guard(self, call: Coroutine[object, object, T], what: str) -> T:
        try:
            return await call
        except self.passed:
            raise
        except Exception as error:  # boundary: SDKs, their transports and decoders raise errors of many types
            raise await self._meaning(error, what) from error

    async def _meaning(self, error: Exception, what: str) -> SandboxError:
        found = self.converted(error, f"sandbox {self._id}: {what}")
        if self.says_gone(error):
            return SandboxGoneError(str(found))
        if isinstance(found, SandboxRateLimitError):
            return found
        # A lost or late answer can mean a slow network or a dead sandbox.
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                is_running = await self._control.is_running(self._id)
        except (SandboxError, TimeoutError):
            return SandboxDeadlineError(f"{found} (whether the sandbox is alive could not be checked)")
        if not is_running:
            return SandboxGoneError(str(found))
        return found if isinstance(found, SandboxDeadlineError) else SandboxProtocolError(str(found))


class Service(Protocol):
    """The calls of one service, which raise only errors of `rayapp.core.errors`."""

    name: str

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> Connection: ...

    def list(self, labels: Mapping[str, str], *, timeout_s: float) -> AsyncIterator[str]: ...

    async def kill(self, sandbox_id: str, *, timeout_s: float) -> None: ...

    def channel(self, connection: Connection) -> Channel: ...

    async def close(self) -> None: ...


class ServiceProvider:
    """Provider that adds deadlines to a service.

    Args:
        answer_within_s: seconds that a call to a sandbox may take beyond the code's own time limit.
    """

    def __init__(self, service: Service, *, answer_within_s: float) -> None:
        self._service = service
        self._answer_within_s = answer_within_s

    @property
    def name(self) -> str:
        return self._service.name

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> RemoteSandbox:
        async with self._in_time(timeout_s, "made no sandbox"):
            connection = await self._service.create(spec, labels=labels, ttl_s=ttl_s, timeout_s=timeout_s)
        return self.attach(connection, spec)

    def attach(self, connection: Connection, spec: SandboxSpec) -> RemoteSandbox:
        channel = self._service.channel(connection)
        return RemoteSandbox(self.name, connection, channel, spec, margin_s=self._answer_within_s)

    async def list(self, labels: Mapping[str, str], *, timeout_s: float = 30.0) -> AsyncIterator[str]:
        async with self._in_time(timeout_s, "did not list its sandboxes"):
            found = [sandbox_id async for sandbox_id in self._service.list(labels, timeout_s=timeout_s)]
        for sandbox_id in found:
            yield sandbox_id

    async def kill(self, sandbox_id: str, *, timeout_s: float = 10.0) -> None:
        async with self._in_time(timeout_s, f"did not end sandbox {sandbox_id}"):
            await self._service.kill(sandbox_id, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._service.close()

    @asynccontextmanager
    async def _in_time(self, timeout_s: float, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            if isinstance(error, SandboxError):
                raise
            raise SandboxDeadlineError(f"sandbox provider {self.name} {what} within {timeout_s:g} s") from None
