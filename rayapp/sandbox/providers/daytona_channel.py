"""The data plane of Daytona: one sandbox through the SDK. Called by `RemoteSandbox`, in the worker's process.

Programs run as shell commands; stateful code in the interpreter context that every sandbox has. The SDK ends some calls
as if they had succeeded when the connection is lost, so nothing here is believed for not having raised.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from rayapp.core.errors import SandboxDeadlineError, SandboxError, SandboxGoneError, SandboxProtocolError
from rayapp.core.types import ExecResult
from rayapp.sandbox.providers.daytona_errors import daytona_error, status_of
from rayapp.sandbox.providers.session import Sink, run_session
from rayapp.sandbox.verdict.program import shell_command, shell_command_of_file

T = TypeVar("T")
_MAX_INLINE_CHARS = 90_000


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
        if len(program) <= _MAX_INLINE_CHARS:
            command = shell_command(program)
        else:
            path = f"/tmp/rayapp-{uuid.uuid4().hex}.py"
            upload = sandbox.fs.upload_file(program.encode(), path, timeout=math.ceil(timeout_s))
            await self._guard(upload, "upload a program")
            command = shell_command_of_file(path)
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

        async def alive() -> bool:
            return await self.alive(timeout_s=10.0)

        return await run_session("daytona", code, run, alive, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

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
        return SandboxProtocolError(f"sandbox {self._id}: status {status_of(error)}: {mapped}")
