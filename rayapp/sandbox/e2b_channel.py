"""The data plane of E2B: one sandbox through the SDK. Called by `RemoteSandbox`, in the worker's process.

Programs run as processes of the sandbox's agent (envd), stateful code in its Jupyter kernel. The SDK's own time limits are
kept by the server or not at all, so they are only a help: the deadline that counts is `RemoteSandbox`'s.
"""

from __future__ import annotations

import asyncio
import shlex
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

import e2b
from e2b.connection_config import ConnectionConfig
from e2b_code_interpreter import AsyncSandbox
from packaging.version import Version

from rayapp.errors import (
    SandboxDeadlineError,
    SandboxError,
    SandboxGoneError,
    SandboxProtocolError,
    SandboxRateLimitError,
)
from rayapp.sandbox.e2b_errors import is_surely_gone
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.remote_sandbox import session_result
from rayapp.types import ExecResult, StopCause

T = TypeVar("T")
_MAX_INLINE_CHARS = 90_000
"""Longest program that goes into a command line: Linux allows 128 KiB per argument."""
_PROBE_TIMEOUT_S = 10.0
MakeConfig = Callable[[dict[str, str]], ConnectionConfig]
"""From headers of one sandbox to the SDK's configuration."""


class Lifecycle:
    """The control plane's calls about one sandbox, as the channel needs them."""

    def __init__(
        self,
        *,
        is_running: Callable[[str], Awaitable[bool]],
        extend: Callable[[str, float], Awaitable[None]],
        kill: Callable[[str], Awaitable[None]],
    ) -> None:
        self.is_running = is_running
        self.extend = extend
        self.kill = kill


class E2BChannel:
    """See `rayapp.sandbox.remote_sandbox.Channel`."""

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

    async def run_python(self, program: str, *, timeout_s: float) -> str:
        if len(program) <= _MAX_INLINE_CHARS:
            return await self._command(f"exec python3 -I -c {shlex.quote(program)}", timeout_s)
        path = f"/tmp/rayapp-{uuid.uuid4().hex}.py"
        await self._guard(self._sandbox.files.write(path, program, request_timeout=timeout_s), "write a program")
        return await self._command(f"python3 -I {path}; rm -f {path}", timeout_s)

    async def _command(self, command: str, timeout_s: float) -> str:
        try:
            run = self._sandbox.commands.run(command, timeout=timeout_s, request_timeout=timeout_s)
            result = await self._guard(run, "run")
        except e2b.CommandExitException as error:
            return str(error.stdout)
        return str(result.stdout)

    async def run_session(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        output = _CappedOutput(max_output_bytes)
        started = time.monotonic()
        stopped: StopCause | None = None
        error = ""
        run = asyncio.ensure_future(
            self._guard(
                # Longer than ours: a time limit of the SDK's would hide whether the code or the way was slow.
                self._sandbox.run_code(code, timeout=timeout_s + 60.0, on_stdout=output.out, on_stderr=output.err),
                "run_code",
            )
        )
        flooded = asyncio.ensure_future(output.is_full.wait())
        try:
            done, _ = await asyncio.wait({run, flooded}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if run in done:
                execution = run.result()
                failed = execution.error
                error = f"{failed.name}: {failed.value}" if failed is not None else ""
            else:
                stopped = StopCause.OUTPUT if flooded in done else StopCause.TIMEOUT
        finally:
            # Closing the request is what stops the kernel.
            for task in (run, flooded):
                task.cancel()
            await asyncio.gather(run, flooded, return_exceptions=True)
        if stopped is StopCause.TIMEOUT and not await self.alive(timeout_s=_PROBE_TIMEOUT_S):
            raise SandboxGoneError(f"sandbox {self._id} ended while code ran in it")
        return session_result(
            "e2b",
            stdout=output.text("out"),
            stderr=output.text("err"),
            error=error,
            duration_s=time.monotonic() - started,
            stopped_for=stopped,
        )

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
        if is_surely_gone(error):
            return SandboxGoneError(text)
        if isinstance(error, e2b.RateLimitException):
            return SandboxRateLimitError(text)
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


class _CappedOutput:
    """What code printed, up to a limit for each stream; `is_full` once it printed more."""

    def __init__(self, max_bytes: int) -> None:
        self.is_full = asyncio.Event()
        self._max_bytes = max_bytes
        self._taken = {"out": bytearray(), "err": bytearray()}

    def out(self, message: object) -> None:
        self._take("out", message)

    def err(self, message: object) -> None:
        self._take("err", message)

    def _take(self, stream: str, message: object) -> None:
        taken = self._taken[stream]
        chunk = str(getattr(message, "line", message)).encode()
        if len(taken) + len(chunk) > self._max_bytes:
            self.is_full.set()
        taken += chunk[: self._max_bytes - len(taken)]

    def text(self, stream: str) -> str:
        return self._taken[stream].decode(errors="replace")
