"""A sandbox while it is on loan: passes every call on, and remembers what that says about using it again.

It adds three things to whatever provider is behind it: a deadline over each call should the provider's own fail, the
sandbox's fate for the pool, and in every result the providers that should have served first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TypeVar

from rayapp.core.errors import SandboxDeadlineError, SandboxError, SandboxGoneError
from rayapp.core.protocols import Sandbox
from rayapp.core.types import CallReport, ExecResult
from rayapp.sandbox.leases import Fate
from rayapp.sandbox.loopback import Loopback, loopback_of

T = TypeVar("T")
MARGIN_S = 65.0
"""Seconds past a call's deadline after which we stop waiting: longer than all deadlines that providers keep."""


class LeasedSandbox:
    """See `rayapp.core.protocols.Sandbox`.

    Args:
        inner: the provider's sandbox.
        fallback_from: providers that could not serve.
        on_exec: told the provider and the seconds of every execution, for the metrics.
    """

    def __init__(
        self,
        inner: Sandbox,
        fallback_from: tuple[str, ...] = (),
        on_exec: Callable[[str, float], None] = lambda provider, seconds: None,
    ) -> None:
        self.fate = Fate.CLEAN
        self._inner = inner
        self._on_exec = on_exec
        self._note = f" (fallback from {', '.join(fallback_from)})" if fallback_from else ""

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def provider(self) -> str:
        return self._inner.provider

    def loopback(self) -> AbstractAsyncContextManager[Loopback]:
        """See `rayapp.sandbox.loopback`. Raises SandboxConfigError: this provider's sandboxes have none."""
        self.fate = Fate.DIRTY  # a relay is left in it
        return loopback_of(self._inner)

    async def run_code(
        self, code: str, *, timeout_s: float, stdin: str = "", stateful: bool = False, max_output_bytes: int = 65536
    ) -> ExecResult:
        if stateful:
            # Not to be used again: names live on in the interpreter, where no check can see them.
            self.fate = Fate.DIRTY
        run = self._inner.run_code(
            code, timeout_s=timeout_s, stdin=stdin, stateful=stateful, max_output_bytes=max_output_bytes
        )
        return self._stamped(await self._timed(run, timeout_s))

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        call = self._inner.call_function(code, function, inputs, timeout_s=timeout_s)
        report = await self._timed(call, timeout_s)
        return replace(report, exec=self._stamped(report.exec))

    async def run_command(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", max_output_bytes: int = 65536
    ) -> ExecResult:
        run = self._inner.run_command(argv, timeout_s=timeout_s, stdin=stdin, max_output_bytes=max_output_bytes)
        return self._stamped(await self._timed(run, timeout_s))

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None:
        await self._watched(self._inner.write_file(path, data, timeout_s=timeout_s), timeout_s)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        return await self._watched(self._inner.read_file(path, max_bytes=max_bytes, timeout_s=timeout_s), timeout_s)

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        return await self._watched(self._inner.alive(timeout_s=timeout_s), timeout_s)

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        await self._watched(self._inner.extend(ttl_s, timeout_s=timeout_s), timeout_s)

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        self.fate = Fate.GONE
        await self._watched(self._inner.kill(timeout_s=timeout_s), timeout_s)

    async def _timed(self, call: Coroutine[object, object, T], timeout_s: float) -> T:
        started = time.monotonic()
        try:
            return await self._watched(call, timeout_s)
        finally:
            self._on_exec(self.provider, time.monotonic() - started)

    async def _watched(self, call: Coroutine[object, object, T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s + MARGIN_S):
                return await call
        except SandboxGoneError:
            self.fate = Fate.GONE
            raise
        except SandboxError:
            self.fate = Fate.DIRTY
            raise
        except TimeoutError:
            self.fate = Fate.DIRTY
            raise SandboxDeadlineError(
                f"sandbox {self.id}: no answer within {timeout_s + MARGIN_S:g} s, though {timeout_s:g} s were given"
            ) from None
        except asyncio.CancelledError:
            # Not to be used again: what it was doing may still go on.
            self.fate = Fate.DIRTY
            raise

    def _stamped(self, result: ExecResult) -> ExecResult:
        if result.stopped_for is not None:
            self.fate = Fate.DIRTY
        return replace(result, isolation=result.isolation + self._note) if self._note else result
