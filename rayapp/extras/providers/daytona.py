"""Daytona through its SDK: the provider, its control plane, and the data plane of one sandbox.

    DaytonaProvider -> ServiceProvider (deadlines) -> DaytonaService (control plane) -> DaytonaChannel

Sandboxes are ephemeral (Daytona deletes them when they stop), and their time to live counts in every state, in whole
minutes. The channel runs programs as shell commands, and stateful code in the interpreter context of every sandbox. It
checks results: some calls of the SDK seem to succeed when the connection is lost.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from rayapp.config.sandbox import DaytonaConfig
from rayapp.core.errors import SandboxConfigError, SandboxError, SandboxGoneError
from rayapp.core.http import retry_after_s
from rayapp.core.types import ExecResult, SandboxSpec
from rayapp.extras.providers.remote import Sink, run_session
from rayapp.extras.providers.service import DAYTONA, SdkChannel, ServiceProvider, error_of, raised_as
from rayapp.sandbox.leases import ANSWER_WITHIN_S, Connection
from rayapp.sandbox.verdict.program import command_of

_NAMES = ("daytona", "daytona_sdk")
_CREATE = "create"


class DaytonaChannel(SdkChannel):
    """Data plane of one sandbox, in the worker's process."""

    def __init__(self, sandbox_id: str, service: DaytonaService) -> None:
        super().__init__(sandbox_id, service)
        self._service = service
        self._found: Any = None

    def converted(self, error: Exception, what: str) -> SandboxError:
        return daytona_error(error, f"{what}: status {_status_of(error)}")

    async def run_python(self, program: str, *, timeout_s: float, max_chars: int) -> str:
        sandbox = await self._sandbox()

        async def write(path: str) -> None:
            upload = sandbox.fs.upload_file(program.encode(), path, timeout=math.ceil(timeout_s))
            await self.guard(upload, "upload a program")

        command = await command_of(program, write)
        answer = await self.guard(sandbox.process.exec(command, timeout=math.ceil(timeout_s)), "exec")
        return str(answer.result)

    async def run_session(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        sandbox = await self._sandbox()

        async def run(text: str, out: Sink, err: Sink) -> str:
            call = sandbox.code_interpreter.run_code(
                text,
                on_stdout=lambda message: out(message.output),
                on_stderr=lambda message: err(message.output),
                # This time limit is a backup: the call's own deadline is shorter, and closes the connection.
                timeout=math.ceil(timeout_s) + 1,
            )
            failed = (await self.guard(call, "run_code")).error
            return f"{failed.name}: {failed.value}" if failed is not None else ""

        return await run_session(
            "daytona", code, run, self.alive, timeout_s=timeout_s, max_output_bytes=max_output_bytes
        )

    async def write_file(self, path: str, data: bytes, *, timeout_s: float) -> None:
        sandbox = await self._sandbox()
        await self.guard(sandbox.fs.upload_file(data, path, timeout=math.ceil(timeout_s)), "upload a file")

    async def alive(self, *, timeout_s: float) -> bool:
        try:
            return await self._service.is_running(self._id)
        except SandboxError:
            return False

    async def _sandbox(self) -> Any:
        if self._found is None:
            self._found = await self._service.get(self._id)
        return self._found


@cache
def sdk() -> ModuleType:
    """Import Daytona's SDK and its client before the first call, whose deadline is shorter than this import.

    Raises SandboxConfigError: the SDK is not installed.
    """
    for name in _NAMES:
        if find_spec(name) is not None:
            with warnings.catch_warnings():
                # Hide the deprecation warning of the older package `daytona_sdk`, because the user didn't choose it.
                warnings.simplefilter("ignore", DeprecationWarning)
                found = importlib.import_module(name)
                _ = found.AsyncDaytona
                return found
    raise SandboxConfigError("the package daytona-sdk is not installed: pip install daytona-sdk")


def daytona_error(error: Exception, what: str) -> SandboxError:
    """Convert an exception of the SDK's call `what`, e.g. `create`.

    Most calls raise DaytonaError, but some ApiException of the generated clients, which shares no base class with it.
    So the HTTP status decides, or else the type.
    """
    text = f"daytona {what}: {type(error).__name__}: {error}"[:600]
    status = _status_of(error)
    if status in (404, 410) and what != _CREATE:
        return SandboxGoneError(text)
    is_timeout = "Timeout" in type(error).__name__ or isinstance(error, TimeoutError)
    is_late = is_timeout if status is None else status in (408, 504)
    return error_of(error, text, DAYTONA, status=status, is_late=is_late, wait_s=_wait_s(error))


def _status_of(error: Exception) -> int | None:
    status = getattr(error, "status_code", None) or getattr(error, "status", None)
    return status if type(status) is int else None


def _wait_s(error: Exception) -> float | None:
    headers = getattr(error, "headers", None) or {}
    waits = [str(value) for name, value in dict(headers).items() if str(name).lower().startswith("retry-after")]
    return max((seconds for wait in waits if (seconds := retry_after_s(wait)) is not None), default=None)


_CALL_TIMEOUT_S = 15.0
_ENDED = ("destroyed", "destroying")


class DaytonaProvider(ServiceProvider):
    def __init__(self, config: DaytonaConfig, *, api_key: str, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        sdk()  # an SDK that is missing is an error now, not at the first call
        super().__init__(DaytonaService(config, api_key), answer_within_s=answer_within_s)


class DaytonaService:
    name = "daytona"

    def __init__(self, config: DaytonaConfig, api_key: str) -> None:
        self._config = config
        self._api_key = api_key
        self._client: Any = None

    def client(self) -> Any:
        """Return the SDK's client, made at the first call because it belongs to the event loop of that time."""
        if self._client is None:
            given = {"api_url": self._config.api_url} if self._config.api_url else {}
            self._client = sdk().AsyncDaytona(sdk().DaytonaConfig(api_key=self._api_key, **given))
        return self._client

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str], ttl_s: float, timeout_s: float
    ) -> Connection:
        with raised_as(daytona_error, "create"):
            made = await self.client().create(self._params(spec, labels, ttl_s), timeout=timeout_s)
        return Connection(sandbox_id=made.id)

    def _params(self, spec: SandboxSpec, labels: Mapping[str, str], ttl_s: float) -> Any:
        minutes = max(1, math.ceil(ttl_s / 60))
        common: dict[str, Any] = {
            "language": "python",
            "labels": dict(labels),
            "env_vars": dict(spec.env),
            "ephemeral": True,
            "ttl_minutes": minutes,
            "auto_stop_interval": minutes,
            "queue_timeout": 1,  # minute
            "network_block_all": True,  # completions could look up their answers
        }
        wanted = self._config.template_of(spec.template) or self._config.template
        if _is_image(wanted):
            return sdk().CreateSandboxFromImageParams(image=wanted, **common)
        return sdk().CreateSandboxFromSnapshotParams(snapshot=wanted or None, **common)

    async def list(self, labels: Mapping[str, str], *, timeout_s: float) -> AsyncIterator[str]:
        states = [state for state in sdk().SandboxState if state.value not in _ENDED]
        query = sdk().ListSandboxesQuery(labels=dict(labels), states=states)
        with raised_as(daytona_error, "list"):
            async for found in self.client().list(query, request_timeout=timeout_s):
                yield str(found.id)

    async def kill(self, sandbox_id: str, *, timeout_s: float = _CALL_TIMEOUT_S) -> None:
        with suppress(SandboxGoneError), raised_as(daytona_error, "delete"):
            found = await self.client().get(sandbox_id, request_timeout=timeout_s)
            await found.delete(timeout=timeout_s)

    async def is_running(self, sandbox_id: str) -> bool:
        try:
            await self.get(sandbox_id)
        except SandboxGoneError:
            return False
        return True

    async def extend(self, sandbox_id: str, ttl_s: float) -> None:
        found = await self.get(sandbox_id)
        with raised_as(daytona_error, "extend"):
            await found.set_ttl(max(1, math.ceil(ttl_s / 60)), request_timeout=_CALL_TIMEOUT_S)
            # Daytona also stops a sandbox without activity, here after its time to live.
            await found.refresh_activity(request_timeout=_CALL_TIMEOUT_S)

    async def get(self, sandbox_id: str) -> Any:
        """Return the SDK's object of a living sandbox. Raises SandboxGoneError."""
        with raised_as(daytona_error, "get"):
            found = await self.client().get(sandbox_id, request_timeout=_CALL_TIMEOUT_S)
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
    """Return whether this names an image, e.g. `org/name:tag`: names of snapshots have no slash and no colon."""
    return "/" in template or ":" in template
