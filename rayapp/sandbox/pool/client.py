"""A rollout worker's way to sandboxes: permission from the pool, everything else between the worker and the sandbox.

    worker -- acquire/release --> pool                (permission and addresses: small and few)
       '---- code, inputs, outputs --> sandbox        (never through the pool)

Remote sandboxes are made and ended by the pool; the worker attaches to the one it was lent. Local sandboxes are
processes of the worker's node, so the worker owns them; the pool only says how many run at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

from rayapp.core.errors import DeadlineError, ProcessUnavailableError, RayappError, SandboxConfigError, SandboxError
from rayapp.core.protocols import Sandbox, SandboxProvider
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Fate, Lease, RemoteProvider
from rayapp.sandbox.pool.leased_sandbox import LeasedSandbox

log = logging.getLogger(__name__)
_RELEASE_ATTEMPTS = 30
_CLOSE_WAIT_S = 1.0


class Pool(Protocol):
    """The sandbox-pool actor's handle, or in tests the actor's plain class."""

    async def acquire(self, holder: str, spec: SandboxSpec, *, timeout_s: float, lease_id: int) -> Lease: ...

    async def release(self, lease_id: int, fate: Fate) -> None:
        """Give a lease back, or the wish for one that was not granted or has not arrived yet. Idempotent."""
        ...

    async def heartbeat(self, holder: str) -> None: ...


@dataclass(slots=True, eq=False, repr=False)
class PoolClient:
    """See `rayapp.core.protocols.SandboxSource`."""

    pool: Pool
    """Grants leases."""
    local: SandboxProvider | None
    """Makes the sandboxes of this process; closed with this client."""
    _: KW_ONLY
    holder: str
    """This caller's name in the pool."""
    ttl_s: float
    """A local sandbox ends after this long, should nobody else end it."""
    remote: Mapping[str, RemoteProvider] = field(default_factory=dict)
    """Providers by name, to attach to what the pool lends; closed with this client."""
    heartbeat_every_s: float = 10.0
    """How often the pool hears that this process lives."""
    on_exec: Callable[[str, float], None] = lambda provider, seconds: None
    """Told the provider and the seconds of every execution, for the metrics."""
    create_timeout_s: float = 90.0
    """Longest wait for a sandbox that this process makes itself, whatever its caller would wait."""
    retry_every_s: float = 2.0
    """Between attempts to give back a lease to a pool that does not answer."""
    _heart: asyncio.Task[None] | None = field(default=None, init=False)
    _late: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> PoolLease:
        """A sandbox for the length of an `async with` block."""
        return PoolLease(self, spec, timeout_s)

    async def acquire(self, spec: SandboxSpec, timeout_s: float) -> tuple[Lease, LeasedSandbox]:
        """A lease and its sandbox; neither, if the sandbox can't be had."""
        if self._heart is None:
            self._heart = asyncio.create_task(self._beat(), name=f"heartbeat of {self.holder}")
        lease = await self._lease(spec, timeout_s)
        try:
            sandbox = await self._sandbox(lease, spec, timeout_s)
        except BaseException as error:
            fate = Fate.UNBORN if isinstance(error, SandboxError) else Fate.DIRTY
            await asyncio.shield(self._give_back(lease.lease_id, fate))
            raise
        return lease, LeasedSandbox(sandbox, lease.fallback_from, self.on_exec)

    async def _lease(self, spec: SandboxSpec, timeout_s: float) -> Lease:
        # Choose the id here, so that a lease whose grant never arrives can be given up all the same.
        lease_id = secrets.randbits(62)
        try:
            return await self.pool.acquire(self.holder, spec, timeout_s=timeout_s, lease_id=lease_id)
        except SandboxError:
            raise  # the pool's own answer: there is no lease
        except (RayappError, asyncio.CancelledError):
            # Give the lease up: the pool may still grant it, or has, and nobody would use it or give it back.
            self._in_background(self._give_back(lease_id, Fate.DIRTY), f"give up lease {lease_id} of {self.holder}")
            raise

    async def _give_back(self, lease_id: int, fate: Fate) -> None:
        """Give a lease back; while the pool does not answer, try again in the background."""
        try:
            await self.pool.release(lease_id, fate)
        except (DeadlineError, ProcessUnavailableError) as error:
            log.warning("%s: lease %d is given back later: %s", self.holder, lease_id, error)
            again = self._give_back_again(lease_id, fate)
            self._in_background(again, f"give lease {lease_id} of {self.holder} back")
        except RayappError as error:
            # The pool is gone, and with it all leases.
            log.warning("%s: lease %d is not given back: %s", self.holder, lease_id, error)

    async def _give_back_again(self, lease_id: int, fate: Fate) -> None:
        for _ in range(_RELEASE_ATTEMPTS):
            await asyncio.sleep(self.retry_every_s)
            try:
                await self.pool.release(lease_id, fate)
                return
            except (DeadlineError, ProcessUnavailableError) as error:
                log.info("%s: lease %d: %s", self.holder, lease_id, error)
            except RayappError as error:
                log.warning("%s: lease %d is not given back: %s", self.holder, lease_id, error)
                return
        log.warning("%s: lease %d could not be given back; it ends by its time to live", self.holder, lease_id)

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
                f"the pool lent a sandbox of {lease.provider}, which {self.holder} has no access to: both must "
                "run with the same sandbox.providers"
            )
        wait_s = min(timeout_s, self.create_timeout_s)
        return await maker.create(spec, labels={"holder": self.holder}, ttl_s=self.ttl_s, timeout_s=wait_s)

    async def release(self, lease: Lease, sandbox: LeasedSandbox) -> None:
        """Give the lease back. A local sandbox is ended before that: in the other order one too many would run."""
        fate = sandbox.fate
        try:
            if lease.connection is None:
                await sandbox.kill()
        except SandboxError as error:
            # Keep the result of what ran in it. The provider's own time limit ends the sandbox.
            log.warning("%s: sandbox %s was not ended: %s", self.holder, sandbox.id, error)
        finally:
            await self._give_back(lease.lease_id, fate)

    async def _beat(self) -> None:
        while True:
            try:
                await self.pool.heartbeat(self.holder)
            except RayappError as error:
                # Only log: if the pool is gone, the next lease fails, and that one has a caller to tell.
                log.warning("%s: the sandbox pool does not answer: %s", self.holder, error)
            await asyncio.sleep(self.heartbeat_every_s)

    async def close(self) -> None:
        """End every sandbox of this process. Idempotent."""
        if self._heart is not None:
            self._heart.cancel()
            self._heart = None
        if self._late:
            await asyncio.wait(self._late, timeout=_CLOSE_WAIT_S)
        for late in self._late:
            late.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        providers = [provider for provider in (self.local, *self.remote.values()) if provider is not None]
        await asyncio.gather(*(provider.close() for provider in providers))


@dataclass(slots=True, eq=False, repr=False)
class PoolLease:
    """See `rayapp.core.protocols.SandboxLease`."""

    client: PoolClient
    spec: SandboxSpec
    timeout_s: float
    _held: tuple[Lease, LeasedSandbox] | None = field(default=None, init=False)

    async def __aenter__(self) -> Sandbox:
        self._held = await self.client.acquire(self.spec, self.timeout_s)
        return self._held[1]

    async def __aexit__(self, *exc: object) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            # Shielded: a cancelled trajectory must not leave its sandbox behind.
            await asyncio.shield(self.client.release(*held))
