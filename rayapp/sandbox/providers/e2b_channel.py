"""The data plane of E2B: one sandbox through the SDK. Called by `RemoteSandbox`, in the worker's process.

Programs run as processes of the sandbox's agent (envd), stateful code in its Jupyter kernel. The SDK's own time limits
are kept by the server or not at all, so they are only a help: the deadline that counts is `RemoteSandbox`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

import e2b
from e2b.connection_config import ConnectionConfig
from e2b_code_interpreter import AsyncSandbox
from packaging.version import Version

from rayapp.core.errors import (
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxRateLimitError,
)
from rayapp.core.types import ExecResult
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.providers.relay import Hear, Say
from rayapp.sandbox.providers.session import Sink, run_session
from rayapp.sandbox.verdict.program import command_of, shell_command

T = TypeVar("T")
_PROBE_TIMEOUT_S = 10.0
MakeConfig = Callable[[dict[str, str]], ConnectionConfig]
"""From headers of one sandbox to the SDK's configuration."""


class _Counted:
    """Ends a command that writes without end: the SDK keeps all that it reads."""

    def __init__(self, max_chars: int) -> None:
        self.room = max_chars

    def take(self, text: str) -> None:
        self.room -= len(text)
        if self.room < 0:
            raise SandboxProtocolError("a command wrote more than a report can have")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifecycle:
    """The control plane's calls about one sandbox, as the channel needs them."""

    is_running: Callable[[str], Awaitable[bool]]
    extend: Callable[[str, float], Awaitable[None]]
    kill: Callable[[str], Awaitable[None]]


class E2BChannel:
    """See `rayapp.sandbox.providers.remote.Channel`."""

    def __init__(self, connection: Connection, make_config: MakeConfig, lifecycle: Lifecycle) -> None:
        self._id = connection.sandbox_id
        self._lifecycle = lifecycle
        headers = {"E2b-Sandbox-Id": self._id, "E2b-Sandbox-Port": str(ConnectionConfig.envd_port)}
        if connection.token:
            headers["X-Access-Token"] = connection.token
        # The SDK's `connect` would ask the control plane once per lease; all it would learn is in the connection.
        self._sandbox = AsyncSandbox(
            sandbox_id=self._id,
            sandbox_domain=connection.endpoint or None,
            envd_version=Version(connection.version),
            envd_access_token=connection.token or None,
            traffic_access_token=connection.traffic_token or None,
            connection_config=make_config(headers),
        )

    async def run_python(self, program: str, *, timeout_s: float, max_chars: int) -> str:
        async def write(path: str) -> None:
            await self._guard(self._sandbox.files.write(path, program, request_timeout=timeout_s), "write a program")

        command, output = await command_of(program, write), _Counted(max_chars)
        try:
            run = self._sandbox.commands.run(
                command, timeout=timeout_s, request_timeout=timeout_s, on_stdout=output.take, on_stderr=output.take
            )
            result = await self._guard(run, "run")
        except e2b.CommandExitException as error:
            return str(error.stdout)
        except SandboxError:
            if output.room < 0:
                return ""  # code that wrote past its watcher; there is no report to be found in it
            raise
        return str(result.stdout)

    async def run_session(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        async def run(text: str, out: Sink, err: Sink) -> str:
            call = self._sandbox.run_code(
                text,
                on_stdout=lambda message: out(message.line),
                on_stderr=lambda message: err(message.line),
                # Longer than ours: a time limit of the SDK's would hide whether the code or the way was slow.
                timeout=timeout_s + 60.0,
            )
            failed = (await self._guard(call, "run_code")).error
            return f"{failed.name}: {failed.value}" if failed is not None else ""

        return await run_session("e2b", code, run, self.alive, timeout_s=timeout_s, max_output_bytes=max_output_bytes)

    async def converse(self, program: str, hear: Hear, started: Callable[[Say], None]) -> None:
        """See `rayapp.sandbox.providers.relay.Converse`."""
        run = self._sandbox.commands.run(
            shell_command(program), background=True, stdin=True, on_stdout=hear, timeout=0, retain_output=False
        )
        handle = await self._guard(run, "start a relay")

        async def say(text: str) -> None:
            await self._guard(handle.send_stdin(text), "say to a relay")

        started(say)
        try:
            await self._guard(handle.wait(), "listen to a relay")
        except e2b.CommandExitException:
            return
        finally:
            await handle.disconnect()

    async def write_file(self, path: str, data: bytes, *, timeout_s: float) -> None:
        try:
            await self._guard(self._sandbox.files.write(path, data, request_timeout=timeout_s), "write a file")
        except (e2b.NotEnoughSpaceException, e2b.InvalidArgumentException) as error:
            raise OSError(f"sandbox {self._id}: {path!r} can't be written: {error}") from None

    async def alive(self, *, timeout_s: float) -> bool:
        try:
            return await self._guard(self._sandbox.is_running(request_timeout=timeout_s), "health")
        except SandboxError:
            return False

    async def extend(self, ttl_s: float, *, timeout_s: float) -> None:
        await self._lifecycle.extend(self._id, ttl_s)

    async def kill(self, *, timeout_s: float) -> None:
        await self._lifecycle.kill(self._id)

    async def _guard(self, call: Coroutine[object, object, T], what: str) -> T:
        try:
            return await call
        except (e2b.CommandExitException, e2b.NotEnoughSpaceException, e2b.InvalidArgumentException):
            raise
        except Exception as error:  # boundary: the SDK, its transports and its decoders raise many things; all mapped
            raise await self._translated(error, what) from error

    async def _translated(self, error: Exception, what: str) -> SandboxError:
        text = f"sandbox {self._id}: {what}: {type(error).__name__}: {error}"[:600]
        says_gone = isinstance(error, e2b.SandboxNotRunningException | e2b.SandboxNotFoundException)
        if says_gone or "sandbox was not found" in str(error).lower():
            return SandboxGoneError(text)
        if isinstance(error, e2b.RateLimitException):
            return SandboxRateLimitError(text)
        # A TimeoutException may be a slow answer or a dead sandbox: only asking tells.
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                is_running = await self._lifecycle.is_running(self._id)
        except (SandboxError, TimeoutError):
            return SandboxDeadlineError(f"{text} (and whether it still lives could not be found out)")
        if not is_running:
            return SandboxGoneError(text)
        if isinstance(error, e2b.TimeoutException | TimeoutError):
            return SandboxDeadlineError(text)
        return SandboxProtocolError(text)
