"""The data plane of Daytona: one sandbox through the SDK. Called by `RemoteSandbox`, in the worker's process.

Here is also what both planes need: the SDK, published under two names with the same code, and its errors as ours.

Programs run as shell commands; stateful code in the interpreter context that every sandbox has. The SDK ends some calls
as if they had succeeded when the connection is lost, so nothing here is believed for not having raised.
"""

from __future__ import annotations

import importlib
import math
import uuid
import warnings
from collections.abc import Callable, Coroutine
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol, TypeVar

from rayapp.core.errors import (
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
)
from rayapp.core.types import ExecResult
from rayapp.sandbox.providers.errors import DAYTONA, error_of, retry_after_s
from rayapp.sandbox.providers.relay import Hear, Say
from rayapp.sandbox.providers.session import Sink, run_session
from rayapp.sandbox.verdict.program import command_of, shell_command

T = TypeVar("T")
_NAMES = ("daytona", "daytona_sdk")
_CREATE = "create"


class Service(Protocol):
    """The control plane's calls about one sandbox, as the channel needs them."""

    async def get(self, sandbox_id: str) -> Any: ...

    async def kill(self, sandbox_id: str, *, timeout_s: float = ...) -> None: ...


class DaytonaChannel:
    """See `rayapp.sandbox.providers.remote.Channel`."""

    def __init__(self, sandbox_id: str, service: Service) -> None:
        self._id = sandbox_id
        self._service = service
        self._found: Any = None

    async def run_python(self, program: str, *, timeout_s: float, max_chars: int) -> str:
        sandbox = await self._sandbox()

        async def write(path: str) -> None:
            upload = sandbox.fs.upload_file(program.encode(), path, timeout=math.ceil(timeout_s))
            await self._guard(upload, "upload a program")

        command = await command_of(program, write)
        answer = await self._guard(sandbox.process.exec(command, timeout=math.ceil(timeout_s)), "exec")
        return str(answer.result)

    async def run_session(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        sandbox = await self._sandbox()

        async def run(text: str, out: Sink, err: Sink) -> str:
            call = sandbox.code_interpreter.run_code(
                text,
                on_stdout=lambda message: out(message.output),
                on_stderr=lambda message: err(message.output),
                # Longer than ours, as a help only: ending the connection is what ends our wait.
                timeout=math.ceil(timeout_s) + 1,
            )
            failed = (await self._guard(call, "run_code")).error
            return f"{failed.name}: {failed.value}" if failed is not None else ""

        return await run_session(
            "daytona", code, run, self.alive, timeout_s=timeout_s, max_output_bytes=max_output_bytes
        )

    async def converse(self, program: str, hear: Hear, started: Callable[[Say], None]) -> None:
        """See `rayapp.sandbox.providers.relay.Converse`."""
        process, session = (await self._sandbox()).process, f"rayapp-{uuid.uuid4().hex}"
        await self._guard(process.create_session(session), "create_session")
        # In a shell of its own, since the session's goes on; and what is said does not come back as if it were printed.
        command = sdk().SessionExecuteRequest(
            command=f"({shell_command(program)})", run_async=True, suppress_input_echo=True
        )
        ran = await self._guard(process.execute_session_command(session, command), "execute_session_command")

        async def say(text: str) -> None:
            await self._guard(process.send_session_command_input(session, ran.cmd_id, text), "say to a relay")

        started(say)
        logs = process.get_session_command_logs_async(session, ran.cmd_id, hear, lambda text: None)
        await self._guard(logs, "listen to a relay")

    async def write_file(self, path: str, data: bytes, *, timeout_s: float) -> None:
        sandbox = await self._sandbox()
        await self._guard(sandbox.fs.upload_file(data, path, timeout=math.ceil(timeout_s)), "upload a file")

    async def alive(self, *, timeout_s: float) -> bool:
        try:
            await self._service.get(self._id)
        except SandboxError:
            return False
        return True

    async def extend(self, ttl_s: float, *, timeout_s: float) -> None:
        sandbox = await self._sandbox()
        await self._guard(sandbox.set_ttl(max(1, math.ceil(ttl_s / 60)), request_timeout=timeout_s), "set_ttl")
        # It also stops by itself when nothing has happened for as long.
        await self._guard(sandbox.refresh_activity(request_timeout=timeout_s), "refresh_activity")

    async def kill(self, *, timeout_s: float) -> None:
        await self._service.kill(self._id, timeout_s=timeout_s)

    async def _sandbox(self) -> Any:
        if self._found is None:
            self._found = await self._service.get(self._id)
        return self._found

    async def _guard(self, call: Coroutine[object, object, T], what: str) -> T:
        try:
            return await call
        except Exception as error:  # boundary: the SDK, its generated clients and aiohttp raise many things; all mapped
            raise await self._translated(error, what) from error

    async def _translated(self, error: Exception, what: str) -> SandboxError:
        mapped = daytona_error(error, what)
        try:
            await self._service.get(self._id)
        except SandboxGoneError as gone:
            return gone
        except SandboxError:
            return SandboxDeadlineError(f"{mapped} (and whether it still lives could not be found out)")
        # The sandbox lives, so this call failed: its answer made no sense, or did not come in time.
        if isinstance(mapped, SandboxDeadlineError):
            return mapped
        return SandboxProtocolError(f"sandbox {self._id}: status {_status_of(error)}: {mapped}")


@cache
def sdk() -> ModuleType:
    """The SDK's module.

    Raises:
        SandboxConfigError: it is not installed.
    """
    for name in _NAMES:
        if find_spec(name) is not None:
            with warnings.catch_warnings():
                # The older name warns that it is older; which one is installed is not the user's choice here.
                warnings.simplefilter("ignore", DeprecationWarning)
                return importlib.import_module(name)
    raise SandboxConfigError("the package daytona-sdk is not installed: pip install daytona-sdk")


def daytona_error(error: Exception, what: str) -> SandboxError:
    """The error for what the SDK raised.

    Most calls raise DaytonaError and its subclasses; some let the generated clients' ApiException through, which has a
    status and no common root with them. So the status decides, and the type only where there is none.

    Args:
        what: the call, for the message, e.g. `create`.
    """
    text = f"daytona {what}: {type(error).__name__}: {error}"[:600]
    status = _status_of(error)
    if status in (404, 410) and what != _CREATE:
        return SandboxGoneError(text)
    is_timeout = "Timeout" in type(error).__name__ or isinstance(error, TimeoutError)
    is_late = is_timeout if status is None else status in (408, 504)
    return error_of(error, text, DAYTONA, status=status, is_late=is_late, wait_s=_wait_s(error))


def _status_of(error: Exception) -> int | None:
    """HTTP status of an error of the SDK or of its generated clients."""
    status = getattr(error, "status_code", None) or getattr(error, "status", None)
    return status if type(status) is int else None


def _wait_s(error: Exception) -> float | None:
    headers = getattr(error, "headers", None) or {}
    waits = [str(value) for name, value in dict(headers).items() if str(name).lower().startswith("retry-after")]
    return max((seconds for wait in waits if (seconds := retry_after_s(wait)) is not None), default=None)
