"""A rollout worker's client of the sandbox pool: the pool grants leases, and the worker calls the sandbox directly.

The pool makes and ends remote sandboxes. Local ones are processes on the worker's node, so the worker owns them; the
pool only limits how many run at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol, TypeVar

from rayapp.core.errors import (
    RayappError,
    SandboxConfigError,
    SandboxDeadlineError,
    SandboxError,
)
from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import CallReport, ExecResult, SandboxSpec
from rayapp.sandbox.leases import Lease, RemoteProvider
from rayapp.sandbox.loopback import Loopback, loopback_of
from rayapp.sandbox.pool.supply import CREATE_TIMEOUT_S

T = TypeVar("T")
MARGIN_S = 65.0  # after a call's deadline; longer than every provider's own grace


class LeasedSandbox:
    """A leased sandbox: adds a second deadline to each call, and records whether it may be used again.

    `on_exec` is called after every execution with the provider's name and the seconds.
    """

    def __init__(
        self,
        inner: Sandbox,
        on_exec: Callable[[str, float], None] = lambda provider, seconds: None,
    ) -> None:
        self.is_clean = True
        self._inner = inner
        self._on_exec = on_exec

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def provider(self) -> str:
        return self._inner.provider

    def loopback(self) -> AbstractAsyncContextManager[Loopback]:
        """Open the sandbox's loopback (`rayapp.sandbox.loopback`)."""
        return loopback_of(self._inner)

    async def run_code(
        self, code: str, *, timeout_s: float, stdin: str = "", stateful: bool = False, max_output_bytes: int = 65536
    ) -> ExecResult:
        if stateful:
            # The sandbox must not be used again: variables stay in the interpreter, where no check can see them.
            self.is_clean = False
        run = self._inner.run_code(
            code, timeout_s=timeout_s, stdin=stdin, stateful=stateful, max_output_bytes=max_output_bytes
        )
        return self._seen(await self._timed(run, timeout_s))

    async def call_function(
        self, code: str, function: str, inputs: Sequence[Sequence[object]], *, timeout_s: float
    ) -> CallReport:
        call = self._inner.call_function(code, function, inputs, timeout_s=timeout_s)
        report = await self._timed(call, timeout_s)
        self._seen(report.exec)
        return report

    async def run_command(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", max_output_bytes: int = 65536
    ) -> ExecResult:
        run = self._inner.run_command(argv, timeout_s=timeout_s, stdin=stdin, max_output_bytes=max_output_bytes)
        return self._seen(await self._timed(run, timeout_s))

    async def write_file(self, path: str, data: bytes, *, timeout_s: float = 10.0) -> None:
        await self._watched(self._inner.write_file(path, data, timeout_s=timeout_s), timeout_s)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, timeout_s: float = 10.0) -> bytes:
        return await self._watched(self._inner.read_file(path, max_bytes=max_bytes, timeout_s=timeout_s), timeout_s)

    async def alive(self, *, timeout_s: float = 5.0) -> bool:
        return await self._watched(self._inner.alive(timeout_s=timeout_s), timeout_s)

    async def extend(self, ttl_s: float, *, timeout_s: float = 5.0) -> None:
        await self._watched(self._inner.extend(ttl_s, timeout_s=timeout_s), timeout_s)

    async def kill(self, *, timeout_s: float = 10.0) -> None:
        self.is_clean = False
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
        except SandboxError:
            self.is_clean = False
            raise
        except TimeoutError:
            self.is_clean = False
            raise SandboxDeadlineError(
                f"sandbox {self.id}: no answer within {timeout_s + MARGIN_S:g} s to a call with timeout_s {timeout_s:g}"
            ) from None
        except asyncio.CancelledError:
            # The sandbox must not be used again, because the call may still run in it.
            self.is_clean = False
            raise

    def _seen(self, result: ExecResult) -> ExecResult:
        if result.stopped_for is not None:
            self.is_clean = False
        return result


log = logging.getLogger(__name__)
_CLOSE_WAIT_S = 1.0


class Pool(Protocol):
    """Interface to the pool: in a run a handle of the sandbox-pool actor, elsewhere a `build.PoolHere`."""

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int) -> Lease: ...

    async def release(self, lease_id: int, is_clean: bool) -> None:
        """Return a lease. If it was not granted yet, its request is withdrawn, even if it arrives later. Idempotent."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class PoolClient:
    """Client through which this process leases sandboxes, as a `core.protocols.SandboxSource`."""

    pool: Pool
    local: SandboxProvider | None  # closed with this client
    _: KW_ONLY
    holder: str  # this caller's name in the pool
    ttl_s: float  # after which a local sandbox that was not released ends
    # Providers that connect to leased sandboxes; closed with this client.
    remote: Mapping[str, RemoteProvider] = field(default_factory=dict)
    on_exec: Callable[[str, float], None] = lambda provider, seconds: None  # called after every execution
    # for a sandbox that this process makes, even if the caller would wait longer
    create_timeout_s: float = CREATE_TIMEOUT_S
    _late: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec, *, timeout_s: float) -> AsyncIterator[Sandbox]:
        """Lease a sandbox while the block runs."""
        lease, sandbox = await self._lease(spec, timeout_s), None
        try:
            sandbox = LeasedSandbox(await self._sandbox(lease, spec, timeout_s), self.on_exec)
            yield sandbox
        finally:
            # Shield the release from cancellation: a cancelled trajectory must not leave its sandbox behind.
            await asyncio.shield(self._release(lease, sandbox))

    async def _lease(self, spec: SandboxSpec, timeout_s: float) -> Lease:
        # The client chooses the id, so that it can return the lease even if the pool's answer never arrives.
        lease_id = secrets.randbits(62)
        try:
            return await self.pool.acquire(self.holder, spec, timeout_s=timeout_s, lease_id=lease_id)
        except SandboxError:
            raise  # the pool refused the lease
        except (RayappError, asyncio.CancelledError):
            # Return the lease: the pool may have granted it, or may still grant it, and no caller would use it.
            self._in_background(self._give_back(lease_id, is_clean=False), f"give up lease {lease_id} of {self.holder}")
            raise

    async def _give_back(self, lease_id: int, *, is_clean: bool) -> None:
        try:
            await self.pool.release(lease_id, is_clean)
        except RayappError as error:
            # Not tried again: a pool that is only slow still receives the call, and one that has died has no leases.
            log.warning("%s: lease %d was not returned to the pool: %s", self.holder, lease_id, error)

    def _in_background(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _sandbox(self, lease: Lease, spec: SandboxSpec, timeout_s: float) -> Sandbox:
        remote = self.remote.get(lease.provider)
        if lease.connection is not None and remote is not None:
            return remote.attach(lease.connection, spec)
        maker = self.local if lease.provider == "local" else remote
        if lease.connection is not None or maker is None:
            raise SandboxConfigError(
                f"the pool leased a sandbox of {lease.provider}, but {self.holder} has no such provider: pool and "
                "worker must have the same sandbox.providers"
            )
        wait_s = min(timeout_s, self.create_timeout_s)
        return await maker.create(spec, labels={"holder": self.holder}, ttl_s=self.ttl_s, timeout_s=wait_s)

    async def _release(self, lease: Lease, sandbox: LeasedSandbox | None) -> None:
        # A local sandbox ends first: otherwise the pool could allow another while it still runs.
        is_clean = sandbox is not None and sandbox.is_clean
        try:
            if lease.connection is None and sandbox is not None:
                await sandbox.kill()
        except SandboxError as error:
            # Keep the execution's result. The provider's own time limit will end the sandbox.
            log.warning("%s: a sandbox could not be ended: %s", self.holder, error)
        finally:
            await self._give_back(lease.lease_id, is_clean=is_clean)

    async def close(self) -> None:
        """End every sandbox of this process. Idempotent."""
        if self._late:
            await asyncio.wait(self._late, timeout=_CLOSE_WAIT_S)
        for late in self._late:
            late.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        providers = [provider for provider in (self.local, *self.remote.values()) if provider is not None]
        await asyncio.gather(*(provider.close() for provider in providers))
