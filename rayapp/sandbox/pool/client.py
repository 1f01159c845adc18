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


class PoolClient:
    """See `rayapp.core.protocols.SandboxSource`.

    Args:
        pool: grants leases.
        local: makes the sandboxes of this process; closed with this client.
        remote: providers by name, to attach to what the pool lends; closed with this client.
        holder: this caller's name in the pool.
        ttl_s: a local sandbox ends after this long, should nobody else end it.
        heartbeat_every_s: how often the pool hears that this process lives.
        on_exec: told the provider and the seconds of every execution, for the metrics.
        create_timeout_s: longest wait for a sandbox that this process makes itself, whatever its caller would wait.
        retry_every_s: between attempts to give back a lease to a pool that does not answer.
    """

    def __init__(
        self,
        pool: Pool,
        local: SandboxProvider | None,
        *,
        holder: str,
        ttl_s: float,
        remote: Mapping[str, RemoteProvider] | None = None,
        heartbeat_every_s: float = 10.0,
        on_exec: Callable[[str, float], None] = lambda provider, seconds: None,
        create_timeout_s: float = 90.0,
        retry_every_s: float = 2.0,
    ) -> None:
        self._create_timeout_s = create_timeout_s
        self._retry_every_s = retry_every_s
        self._pool = pool
        self._local = local
        self._remote = dict(remote or {})
        self._holder = holder
        self._ttl_s = ttl_s
        self._heartbeat_every_s = heartbeat_every_s
        self._on_exec = on_exec
        self._heart: asyncio.Task[None] | None = None
        self._late: set[asyncio.Task[None]] = set()

    def lease(self, spec: SandboxSpec, *, timeout_s: float) -> PoolLease:
        """A sandbox for the length of an `async with` block."""
        return PoolLease(self, spec, timeout_s)

    async def acquire(self, spec: SandboxSpec, timeout_s: float) -> tuple[Lease, LeasedSandbox]:
        """A lease and its sandbox; neither, if the sandbox can't be had."""
        if self._heart is None:
            self._heart = asyncio.create_task(self._beat(), name=f"heartbeat of {self._holder}")
        lease = await self._lease(spec, timeout_s)
        try:
            sandbox = await self._sandbox(lease, spec, timeout_s)
        except BaseException as error:
            fate = Fate.UNBORN if isinstance(error, SandboxError) else Fate.DIRTY
            await asyncio.shield(self._give_back(lease.lease_id, fate))
            raise
        return lease, LeasedSandbox(sandbox, lease.fallback_from, self._on_exec)

    async def _lease(self, spec: SandboxSpec, timeout_s: float) -> Lease:
        # Choose the id here, so that a lease whose grant never arrives can be given up all the same.
        lease_id = secrets.randbits(62)
        try:
            return await self._pool.acquire(self._holder, spec, timeout_s=timeout_s, lease_id=lease_id)
        except SandboxError:
            raise  # the pool's own answer: there is no lease
        except (RayappError, asyncio.CancelledError):
            # Give the lease up: the pool may still grant it, or has, and nobody would use it or give it back.
            self._in_background(self._give_back(lease_id, Fate.DIRTY), f"give up lease {lease_id} of {self._holder}")
            raise

    async def _give_back(self, lease_id: int, fate: Fate) -> None:
        """Give a lease back; while the pool does not answer, try again in the background."""
        try:
            await self._pool.release(lease_id, fate)
        except (DeadlineError, ProcessUnavailableError) as error:
            log.warning("%s: lease %d is given back later: %s", self._holder, lease_id, error)
            again = self._give_back_again(lease_id, fate)
            self._in_background(again, f"give lease {lease_id} of {self._holder} back")
        except RayappError as error:
            # The pool is gone, and with it all leases.
            log.warning("%s: lease %d is not given back: %s", self._holder, lease_id, error)

    async def _give_back_again(self, lease_id: int, fate: Fate) -> None:
        for _ in range(_RELEASE_ATTEMPTS):
            await asyncio.sleep(self._retry_every_s)
            try:
                await self._pool.release(lease_id, fate)
                return
            except (DeadlineError, ProcessUnavailableError) as error:
                log.info("%s: lease %d: %s", self._holder, lease_id, error)
            except RayappError as error:
                log.warning("%s: lease %d is not given back: %s", self._holder, lease_id, error)
                return
        log.warning("%s: lease %d could not be given back; it ends by its time to live", self._holder, lease_id)

    def _in_background(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _sandbox(self, lease: Lease, spec: SandboxSpec, timeout_s: float) -> Sandbox:
        remote = self._remote.get(lease.provider)
        if lease.connection is not None and remote is not None:
            return remote.attach(lease.connection, spec)
        maker = self._local if lease.provider == "local" else remote
        if lease.connection is not None or maker is None:
            raise SandboxConfigError(
                f"the pool lent a sandbox of {lease.provider}, which {self._holder} has no access to: both must "
                "run with the same sandbox.providers"
            )
        wait_s = min(timeout_s, self._create_timeout_s)
        return await maker.create(spec, labels={"holder": self._holder}, ttl_s=self._ttl_s, timeout_s=wait_s)

    async def release(self, lease: Lease, sandbox: LeasedSandbox) -> None:
        """Give the lease back. A local sandbox is ended before that: in the other order one too many would run."""
        fate = sandbox.fate
        try:
            if lease.connection is None:
                await sandbox.kill()
        except SandboxError as error:
            # Keep the result of what ran in it. The provider's own time limit ends the sandbox.
            log.warning("%s: sandbox %s was not ended: %s", self._holder, sandbox.id, error)
        finally:
            await self._give_back(lease.lease_id, fate)

    async def _beat(self) -> None:
        while True:
            try:
                await self._pool.heartbeat(self._holder)
            except RayappError as error:
                # Only log: if the pool is gone, the next lease fails, and that one has a caller to tell.
                log.warning("%s: the sandbox pool does not answer: %s", self._holder, error)
            await asyncio.sleep(self._heartbeat_every_s)

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
        providers = [provider for provider in (self._local, *self._remote.values()) if provider is not None]
        await asyncio.gather(*(provider.close() for provider in providers))


class PoolLease:
    """See `rayapp.core.protocols.SandboxLease`."""

    def __init__(self, client: PoolClient, spec: SandboxSpec, timeout_s: float) -> None:
        self._client = client
        self._spec = spec
        self._timeout_s = timeout_s
        self._held: tuple[Lease, LeasedSandbox] | None = None

    async def __aenter__(self) -> Sandbox:
        self._held = await self._client.acquire(self._spec, self._timeout_s)
        return self._held[1]

    async def __aexit__(self, *exc: object) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            # Shielded: a cancelled trajectory must not leave its sandbox behind.
            await asyncio.shield(self._client.release(*held))
