"""The sandbox pool: grants leases of sandboxes, in turn and up to a maximum number. Each lease has a time to live.

    acquire -> queue -> (a ready sandbox | permission to make a local one) -> Lease -> release -> reuse or end

It runs in one asyncio event loop, without Ray; the sandbox-pool actor wraps it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rayapp.core.errors import SandboxError, SandboxUnavailableError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Lease
from rayapp.sandbox.pool.stock import Stock
from rayapp.sandbox.pool.supply import IDLE_TIMEOUT_S, StockItem

_MIN_NAP_S = 0.005
_MAX_NAP_S = 5.0
_GIVEN_UP_KEPT = 1024
_LAST_WAITS = 2048
Turn = asyncio.Future[Lease]


class PoolStats:
    """Counts since the pool's start, and the seconds that the most recent callers waited."""

    def __init__(self) -> None:
        self.num_granted = 0
        self.num_reclaimed = 0
        self.waits_s: deque[float] = deque(maxlen=_LAST_WAITS)

    def scalars(self, *, num_leased: int, num_waiting: int) -> dict[str, float]:
        waits_s = sorted(self.waits_s) or [0.0]
        p50_s, p99_s = (waits_s[min(len(waits_s) - 1, int(share * len(waits_s)))] for share in (0.5, 0.99))
        return {
            "sandbox/leased": float(num_leased),
            "sandbox/waiting": float(num_waiting),
            "sandbox/granted": float(self.num_granted),
            "sandbox/reclaimed": float(self.num_reclaimed),
            "sandbox/wait_p50_s": p50_s,
            "sandbox/wait_p99_s": p99_s,
        }


@dataclass(slots=True, eq=False)
class _Lane:
    """The callers that wait for one kind of sandbox."""

    used_at: float  # last request for this kind
    waiting: OrderedDict[int, tuple[str, Turn]] = field(default_factory=OrderedDict)  # by lease: (holder, turn)
    num_in_use: int = 0  # leased sandboxes of this kind that a stock made


@dataclass(frozen=True, slots=True)
class _Held:
    lease: Lease
    item: StockItem | None


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class LeasePool:
    """Pool that grants at most `max_leases` leases at a time."""

    max_leases: int
    ttl_s: float  # after which a lease that was not released is reclaimed
    provider: str = "local"  # in every lease
    stock: Stock | None = None  # None if the lease holders make the sandboxes
    min_ready: int = 0  # for each kind in use
    idle_timeout_s: float = IDLE_TIMEOUT_S  # without a request; no sandboxes of a kind are then kept ready
    clock: Callable[[], float] = time.monotonic
    # A random start: a pool that replaces a dead pool must not use ids that callers still hold.
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(secrets.randbits(40) << 20))
    _leases: dict[int, _Held] = field(default_factory=dict)
    _turns: dict[int, Turn] = field(default_factory=dict)
    _given_up: dict[int, None] = field(default_factory=dict)
    _lanes: dict[SandboxSpec, _Lane] = field(default_factory=dict)
    _stats: PoolStats = field(default_factory=PoolStats)
    _nap: asyncio.TimerHandle | None = None
    _is_closed: bool = False

    async def acquire(
        self, holder: str, spec: SandboxSpec | None = None, *, timeout_s: float, lease_id: int | None = None
    ) -> Lease:
        """Wait for this caller's turn and return its lease. A caller in another process chooses `lease_id` at random:
        with it, it can release the lease even if the pool's answer is lost.

        A SandboxUnavailableError (none free in time) may pass; a SandboxConfigError never does.
        """
        self._check_open()
        self.reclaim_expired()
        key = next(self._ids) if lease_id is None else lease_id
        if key in self._given_up:
            raise SandboxUnavailableError(
                f"lease {key} was not granted: its caller cancelled the request before it arrived"
            )
        lane = self._lane(spec or SandboxSpec())
        turn = self._turns[key] = asyncio.get_running_loop().create_future()
        lane.waiting[key] = holder, turn
        started_at = self.clock()
        try:
            self.pump()
            if turn.done():
                return self._granted(turn, started_at)
            # wait_for is not used: on Python 3.11 it loses a cancellation that arrives together with the grant.
            async with asyncio.timeout(timeout_s):
                await turn
            return self._granted(turn, started_at)
        except TimeoutError:
            self._give_up(lane, key, turn)
            raise SandboxUnavailableError(self._why_none(timeout_s)) from None
        except BaseException:
            self._give_up(lane, key, turn)
            raise
        finally:
            del self._turns[key]

    def _granted(self, turn: Turn, started_at: float) -> Lease:
        lease = turn.result()
        self._stats.waits_s.append(self.clock() - started_at)
        return lease

    @property
    def _num_waiting(self) -> int:
        return sum(len(lane.waiting) for lane in self._lanes.values())

    def _give_up(self, lane: _Lane, key: int, turn: Turn) -> None:
        if lane.waiting.pop(key, None) is None and turn.done() and not turn.cancelled() and turn.exception() is None:
            self.release(turn.result().lease_id)

    def _why_none(self, timeout_s: float) -> str:
        text = (
            f"no sandbox was free within {timeout_s:g} s: {len(self._leases)} of {self.max_leases} are leased, and "
            f"{self._num_waiting} callers wait. Raise sandbox.max_leases, or lower the tasks' timeout_s."
        )
        failure = self.stock.supply.last_error if self.stock is not None else ""
        return f"{text} Last failure: {failure}" if failure else text

    def release(self, lease_id: int, *, is_clean: bool = False) -> None:
        """End a lease, or the wait for it. A lease that has already ended is ignored. Only a clean sandbox, whose calls
        were all answered and whose code ended by itself, may be leased again, after a check."""
        held = self._leases.pop(lease_id, None)
        if held is None:
            self._withdraw(lease_id)
            return
        if held.item is not None and self.stock is not None:
            self.stock.give_back(held.item, is_clean=is_clean)
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
        else:
            _refuse(turn, SandboxUnavailableError(f"lease {lease_id} was cancelled while its caller waited"))

    def keep_ready(self, spec: SandboxSpec) -> None:
        """Make `min_ready` sandboxes of a kind before the first request for it."""
        self._lane(spec)
        self.pump()

    def reclaim_expired(self) -> int:
        """Take back the leases whose time to live is over. Return their number."""
        now = self.clock()
        # Stop at the first lease that has not expired: leases are in the order in which they were granted, and all last
        # equally long.
        expired = [*itertools.takewhile(lambda held: held.lease.expires_at <= now, self._leases.values())]
        return self._reclaim([held.lease.lease_id for held in expired])

    def reclaim_of(self, holder: str) -> int:
        """Take back all leases of a dead holder, and refuse its waiting callers. Return the leases' number."""
        gone = SandboxUnavailableError(f"the lease was cancelled, because its holder {holder} is gone")
        for lane in self._lanes.values():
            for key in [key for key, (own, _) in lane.waiting.items() if own == holder]:
                _refuse(lane.waiting.pop(key)[1], gone)
        return self._reclaim([held.lease.lease_id for held in self._leases.values() if held.lease.holder == holder])

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
        # Remove callers that no longer wait: they stay in the queue until their own task runs again.
        while lane.waiting and next(iter(lane.waiting.values()))[1].done():
            lane.waiting.popitem(last=False)
        if not lane.waiting or len(self._leases) >= self.max_leases:
            return False
        item = self.stock.supply.take_ready(spec) if self.stock is not None else None
        if item is None and self.stock is not None:
            return False
        self._grant(lane, item)
        return True

    def _grant(self, lane: _Lane, item: StockItem | None) -> None:
        lease_id, (holder, turn) = lane.waiting.popitem(last=False)
        lane.num_in_use += item is not None
        lease = Lease(
            lease_id=lease_id,
            holder=holder,
            expires_at=self.clock() + self.ttl_s,
            provider=self.provider,
            connection=item.connection if item is not None else None,
        )
        self._leases[lease.lease_id] = _Held(lease, item)
        self._stats.num_granted += 1
        turn.set_result(lease)

    def _stock_up(self, spec: SandboxSpec, lane: _Lane) -> float:
        """Start missing sandboxes. Return the seconds until more may be started."""
        if self.stock is None:
            return float("inf")
        supply = self.stock.supply
        num_missing = len(lane.waiting) + self.min_ready - supply.num_ready(spec) - supply.num_creating[spec]
        if num_missing > 0 and not supply.has_room:
            self._make_room(self.stock, spec)
        for _ in range(num_missing):
            if not supply.may_create():
                return supply.next_chance_s()
            self.stock.create(spec)
        return float("inf")

    def _make_room(self, stock: Stock, spec: SandboxSpec) -> None:
        """End an idle sandbox of a kind that no caller waits for, to make room for one of the kind `spec`."""
        for item in stock.supply.idle_items():
            lane = self._lanes.get(item.spec)
            if item.spec != spec and (lane is None or not lane.waiting):
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
        lane = self._lanes.setdefault(spec, _Lane(self.clock()))
        lane.used_at = self.clock()
        return lane

    def refuse(self, spec: SandboxSpec, error: SandboxError) -> None:
        """Raise the error in every caller that waits for this kind, because none can ever be made."""
        if (lane := self._lanes.get(spec)) is not None:
            waiting, lane.waiting = lane.waiting, OrderedDict()
            for _, turn in waiting.values():
                _refuse(turn, error)

    def tend(self) -> None:
        """Reclaim expired leases, then extend or end sandboxes. Called every few seconds."""
        self.reclaim_expired()
        oldest = self.clock() - self.idle_timeout_s
        for spec, lane in tuple(self._lanes.items()):
            if not lane.waiting and not lane.num_in_use and lane.used_at < oldest:
                del self._lanes[spec]
        if self.stock is not None:
            self.stock.tend(self._lanes.keys(), num_kept=self.min_ready)
        self.pump()

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


def _refuse(turn: Turn, error: SandboxError) -> None:
    if not turn.done():
        turn.set_exception(error)
