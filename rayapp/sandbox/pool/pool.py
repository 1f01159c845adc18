"""The sandbox pool: grants leases of sandboxes, fairly and up to a maximum number. Each lease has a time to live.

    acquire -> queue -> (a ready sandbox | permission to make a local one) -> Lease -> release -> reuse or end

It runs in one asyncio event loop, without Ray; the sandbox-pool actor wraps it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rayapp.core.errors import SandboxError, SandboxUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Fate, Lease
from rayapp.sandbox.pool.stock import Stock
from rayapp.sandbox.pool.supply import IDLE_TIMEOUT_S, StockItem, Supply
from rayapp.sandbox.pool.waiting import FairQueue, PoolStats

__all__ = ["Fate", "Lease", "LeasePool"]
_MIN_NAP_S = 0.005
_MAX_NAP_S = 5.0
_GIVEN_UP_KEPT = 1024
MAX_WAITING = 10_000  # callers that may wait at once; further ones are refused at once instead of at their deadlines
Turn = asyncio.Future[Lease]


@dataclass(slots=True, eq=False)
class _Lane:
    """Queue of the callers that wait for the same kind of sandbox."""

    queue: FairQueue[tuple[str, int, Turn]]  # (holder, id of the lease, turn)
    used_at: float  # last request for this kind
    num_in_use: int = 0  # leased sandboxes of this kind that a stock made
    num_wanted_ready: int = 0  # asked for by `prefetch`


@dataclass(frozen=True, slots=True)
class _Held:
    lease: Lease
    item: StockItem | None


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class LeasePool:
    """Pool that grants at most `max_leases` leases at a time."""

    max_leases: int
    ttl_s: float  # after which a lease that was not released is reclaimed
    # State of the sandboxes; by default the holders themselves make them.
    supply: Supply = field(default_factory=lambda: Supply("local", max_sandboxes=1 << 30, clock=time.monotonic))
    stock: Stock | None = None  # None if the lease holders make the sandboxes
    min_ready: int = 0  # for each kind in use
    max_waiting: int = MAX_WAITING
    holder_timeout_s: float = float("inf")  # without a heartbeat; the holder then counts as dead
    idle_timeout_s: float = IDLE_TIMEOUT_S
    clock: Callable[[], float] = time.monotonic
    # A random start: a pool that replaces a dead pool must not use ids that callers still hold.
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(secrets.randbits(40) << 20))
    _leases: dict[int, _Held] = field(default_factory=dict)
    _turns: dict[int, Turn] = field(default_factory=dict)
    _given_up: dict[int, None] = field(default_factory=dict)
    _lanes: dict[SandboxSpec, _Lane] = field(default_factory=dict)
    _heard_of: dict[str, float] = field(default_factory=dict)
    _num_waiting: int = 0
    _stats: PoolStats = field(init=False)
    _nap: asyncio.TimerHandle | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._stats = PoolStats()

    async def acquire(
        self, holder: str, spec: SandboxSpec | None = None, *, timeout_s: float, lease_id: int | None = None
    ) -> Lease:
        """Wait for this caller's turn and return its lease. A caller in another process chooses `lease_id` at random:
        with it, it can release the lease even if the pool's answer is lost.

        A SandboxUnavailableError (none free in time, too many callers) may pass; a SandboxConfigError never does.
        """
        self._check_open()
        self.reclaim_expired()
        self.heartbeat(holder)
        key = next(self._ids) if lease_id is None else lease_id
        if key in self._given_up:
            raise SandboxUnavailableError(
                f"lease {key} was not granted: its caller cancelled the request before it arrived"
            )
        lane = self._lane(spec or SandboxSpec())
        turn = self._turns[key] = asyncio.get_running_loop().create_future()
        lane.queue.push(holder, key, (holder, key, turn))
        self._num_waiting += 1
        started_at = self.clock()
        try:
            self.pump()
            if turn.done():
                return self._granted(turn, started_at)
            if self._num_waiting > self.max_waiting:
                raise SandboxUnavailableError(
                    f"{self._num_waiting - 1} callers already wait for a sandbox, which is the maximum: raise "
                    "sandbox.max_leases"
                )
            # wait_for is not used: on Python 3.11 it loses a cancellation that arrives together with the grant.
            async with asyncio.timeout(timeout_s):
                await turn
            return self._granted(turn, started_at)
        except TimeoutError:
            self._give_up(lane, holder, key, turn)
            raise SandboxUnavailableError(self._why_none(timeout_s)) from None
        except BaseException:
            self._give_up(lane, holder, key, turn)
            raise
        finally:
            del self._turns[key]

    def _granted(self, turn: Turn, started_at: float) -> Lease:
        lease = turn.result()
        self._stats.waited(self.clock() - started_at)
        return lease

    def _give_up(self, lane: _Lane, holder: str, key: int, turn: Turn) -> None:
        if lane.queue.remove(holder, key):
            self._num_waiting -= 1
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self.release(turn.result().lease_id)

    def _why_none(self, timeout_s: float) -> str:
        text = (
            f"no sandbox was free within {timeout_s:g} s: {len(self._leases)} of {self.max_leases} are leased, and "
            f"{self._num_waiting} callers wait. Raise sandbox.max_leases, or lower the tasks' timeout_s."
        )
        return f"{text} Last failure: {self.supply.last_error}" if self.supply.last_error else text

    def release(self, lease_id: int, fate: Fate = Fate.DIRTY) -> None:
        """End a lease, or the wait for it. A lease that has already ended is ignored."""
        held = self._leases.pop(lease_id, None)
        if held is None:
            self._withdraw(lease_id)
            return
        if held.item is None or self.stock is None:
            self.supply.num_places_taken -= 1
        else:
            self.stock.give_back(held.item, is_clean=fate is Fate.CLEAN)
            if (lane := self._lanes.get(held.item.spec)) is not None:
                lane.num_in_use -= 1
        self.pump()

    def _withdraw(self, lease_id: int) -> None:
        turn = self._turns.get(lease_id)
        if turn is None:
            # The call of release() may arrive before that of acquire(): remember the id, and refuse the lease when
            # acquire() arrives.
            self._given_up[lease_id] = None
            if len(self._given_up) > _GIVEN_UP_KEPT:
                del self._given_up[next(iter(self._given_up))]
        elif not turn.done():
            turn.set_exception(SandboxUnavailableError(f"lease {lease_id} was cancelled while its caller waited"))

    def heartbeat(self, holder: str) -> None:
        self._heard_of[holder] = self.clock()

    def prefetch(self, spec: SandboxSpec, num_ready: int) -> None:
        """Keep this many sandboxes of a kind ready before they are needed; 0 cancels this."""
        self._lane(spec).num_wanted_ready = num_ready
        self.pump()

    def reclaim_expired(self) -> int:
        """Take back the leases whose time to live is over. Return their number."""
        now = self.clock()
        # Stop at the first lease that has not expired: leases are in the order in which they were granted, and all last
        # equally long.
        expired = [*itertools.takewhile(lambda held: held.lease.expires_at <= now, self._leases.values())]
        return self._reclaim([held.lease.lease_id for held in expired])

    def reclaim_of(self, *holders: str) -> int:
        """Take back all leases of dead holders, and remove their callers from the queue. Return the leases' number."""
        for holder in holders:
            # First remove the waiting callers of all dead holders. Otherwise a lease that becomes free could go to one
            # of them.
            self._heard_of.pop(holder, None)
            self._withdraw_all(holder)
        return self._reclaim([held.lease.lease_id for held in self._leases.values() if held.lease.holder in holders])

    def _withdraw_all(self, holder: str) -> None:
        for lane in self._lanes.values():
            gone = lane.queue.remove_all(holder)
            self._num_waiting -= len(gone)
            for _, lease_id, turn in gone:
                if not turn.done():
                    turn.set_exception(
                        SandboxUnavailableError(f"lease {lease_id} was cancelled, because its holder {holder} is gone")
                    )

    def reclaim_silent(self) -> int:
        """Take back the leases of holders without a recent heartbeat. Return their number."""
        oldest = self.clock() - self.holder_timeout_s
        return self.reclaim_of(*(holder for holder, heard_at in self._heard_of.items() if heard_at <= oldest))

    def _reclaim(self, lease_ids: list[int]) -> int:
        self._stats.num_reclaimed += len(lease_ids)
        for lease_id in lease_ids:
            self.release(lease_id)
        return len(lease_ids)

    def pump(self) -> None:
        """Grant every lease that can be granted, and start missing sandboxes. Called after every event; never waits."""
        if self._is_closed:
            # A pool that is being closed must not replace the sandboxes that end.
            return
        is_progress = True
        while is_progress and self._num_waiting and len(self._leases) < self.max_leases:
            # Serve one caller per kind and round, so that no kind of sandbox starves another.
            is_progress = sum(self._serve_one(spec, lane) for spec, lane in tuple(self._lanes.items())) > 0
        nap_s = min((self._stock_up(spec, lane) for spec, lane in self._lanes.items()), default=float("inf"))
        self._wake_in(nap_s)

    def _serve_one(self, spec: SandboxSpec, lane: _Lane) -> bool:
        self._drop_gone(lane)
        if not lane.queue or len(self._leases) >= self.max_leases:
            return False
        item = self.supply.take_ready(spec)
        if item is None and not self.supply.has_place:
            return False
        self._grant(lane, item)
        return True

    def _drop_gone(self, lane: _Lane) -> None:
        # Remove callers that no longer wait: they stay in the queue until their own task runs again.
        while lane.queue and lane.queue.first()[2].done():
            lane.queue.pop()
            self._num_waiting -= 1

    def _grant(self, lane: _Lane, item: StockItem | None) -> None:
        holder, lease_id, turn = lane.queue.pop()
        self._num_waiting -= 1
        if item is None:
            self.supply.num_places_taken += 1
        else:
            lane.num_in_use += 1
        lease = Lease(
            lease_id=lease_id,
            holder=holder,
            expires_at=self.clock() + self.ttl_s,
            provider=self.supply.name,
            connection=item.connection if item is not None else None,
        )
        self._leases[lease.lease_id] = _Held(lease, item)
        self._stats.num_granted += 1
        turn.set_result(lease)

    def _stock_up(self, spec: SandboxSpec, lane: _Lane) -> float:
        """Start missing sandboxes. Return the seconds until more may be started."""
        if self.stock is None:
            return float("inf")
        num_wanted = len(lane.queue) + max(self.min_ready, lane.num_wanted_ready)
        num_missing = num_wanted - self.supply.num_ready(spec) - self.supply.num_creating[spec]
        if num_missing > 0 and not self.supply.has_room:
            self._make_room(self.stock, spec)
        for _ in range(num_missing):
            if not self.supply.may_create():
                return self.supply.next_chance_s()
            self.stock.create(spec)
        return float("inf")

    def _make_room(self, stock: Stock, spec: SandboxSpec) -> None:
        """End an idle sandbox of a kind that no caller waits for, to make room for one of the kind `spec`."""
        for item in self.supply.idle_items():
            lane = self._lanes.get(item.spec)
            if item.spec != spec and (lane is None or not lane.queue):
                stock.retire(item)
                return

    def _wake_in(self, seconds: float) -> None:
        if self._nap is not None:
            self._nap.cancel()
            self._nap = None
        if seconds < float("inf") and not self._is_closed:
            nap_s = min(max(seconds, _MIN_NAP_S), _MAX_NAP_S)
            self._nap = asyncio.get_running_loop().call_later(nap_s, self.pump)

    def _lane(self, spec: SandboxSpec) -> _Lane:
        lane = self._lanes.get(spec)
        if lane is None:
            lane = self._lanes[spec] = _Lane(FairQueue(), self.clock())
        lane.used_at = self.clock()
        return lane

    def refuse(self, spec: SandboxSpec, error: SandboxError) -> None:
        """Raise the error in every caller that waits for this kind, because none can ever be made."""
        lane = self._lanes.get(spec)
        while lane is not None and lane.queue:
            _, _, turn = lane.queue.pop()
            self._num_waiting -= 1
            if not turn.done():
                turn.set_exception(error)

    def tend(self) -> None:
        """Reclaim leases of dead holders and expired leases, then extend or end sandboxes. Called every few seconds."""
        self.reclaim_silent()  # reclaim these first: otherwise a lease that expired could go to a dead holder
        self.reclaim_expired()
        self._forget_unused_lanes()
        if self.stock is not None:
            self.stock.tend(self._lanes.keys())
        self.pump()

    def _forget_unused_lanes(self) -> None:
        oldest = self.clock() - self.idle_timeout_s
        for spec, lane in tuple(self._lanes.items()):
            if not lane.queue and not lane.num_wanted_ready and not lane.num_in_use and lane.used_at < oldest:
                del self._lanes[spec]

    async def close(self, *, timeout_s: float = 30.0) -> set[str]:
        """End every sandbox and refuse waiting callers. Return the ids of sandboxes that could not be ended.
        Idempotent."""
        if self._is_closed:
            return set()
        self._is_closed = True
        self._wake_in(float("inf"))
        for spec in tuple(self._lanes):
            self.refuse(spec, SandboxUnavailableError("the sandbox pool is closed"))
        self._leases.clear()
        return await self.stock.close(timeout_s=timeout_s) if self.stock is not None else set()

    def _check_open(self) -> None:
        if self._is_closed:
            raise SandboxUnavailableError("the sandbox pool is closed")

    def stats(self) -> dict[str, float]:
        of_leases = self._stats.scalars(num_leased=len(self._leases), num_waiting=self._num_waiting)
        return of_leases | (self.stock.scalars() if self.stock is not None else {})
