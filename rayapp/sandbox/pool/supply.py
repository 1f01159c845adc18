"""State of one provider: its sandboxes, how many it may have, and whether to ask for more now.

Pure bookkeeping, no I/O: `stock.py` makes and ends sandboxes by these rules, `pool.py` decides which caller gets one.
A circuit breaker decides when to leave a failing provider alone, and for how long.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from rayapp.core.errors import SandboxError
from rayapp.core.http import TokenBucket
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Connection

MAX_COOLDOWN_S = 600.0
FIRST_BACKOFF_S = 0.2


class CircuitBreaker:
    """Stops calls to a failing provider for a while.

    Closed: calls pass, with a growing pause after each failure. Open: no calls. After the cool-down: one trial call,
    whose outcome closes or reopens the breaker.

    Args:
        failures: number of failures in a row that open it.
        cooldown_s: length of the first opening; doubled with each failed trial, up to ten minutes.
        clock: monotonic seconds.
        rng: jitter of the pauses, so that many pools do not come back at the same moment.
    """

    def __init__(
        self, *, failures: int, cooldown_s: float, clock: Callable[[], float], rng: random.Random | None = None
    ) -> None:
        self._failures = failures
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._rng = rng or random.Random()
        self._num_failed = 0
        self._open_until: float | None = None
        self._next_cooldown_s = cooldown_s

    @property
    def is_open(self) -> bool:
        """True while no call may be made."""
        return self._open_until is not None and self._clock() < self._open_until

    @property
    def is_on_trial(self) -> bool:
        """True when the cool-down is over: one call may be made, and its outcome closes or reopens the breaker."""
        return self._open_until is not None and not self.is_open

    @property
    def reopens_in_s(self) -> float:
        """Seconds until a call may be made; 0 if one may be made now."""
        return max(0.0, self._open_until - self._clock()) if self._open_until is not None else 0.0

    def succeeded(self) -> None:
        """Note that a call succeeded: close the breaker and forget past failures."""
        self._num_failed = 0
        self._open_until = None
        self._next_cooldown_s = self._cooldown_s

    def failed(self) -> float:
        """Note that a call failed. Returns seconds until the next: exponential, with jitter, while closed."""
        was_on_trial = self.is_on_trial
        self._num_failed += 1
        if was_on_trial or (self._open_until is None and self._num_failed >= self._failures):
            self._open_until = self._clock() + self._next_cooldown_s * self._rng.uniform(1.0, 1.2)
            self._next_cooldown_s = min(MAX_COOLDOWN_S, self._next_cooldown_s * 2)
        exponent = min(self._num_failed, 10) - 1
        return float(min(FIRST_BACKOFF_S * 2**exponent, self._cooldown_s) * self._rng.uniform(0.5, 1.0))


class StockState(StrEnum):
    """Stage in the life of a remote sandbox."""

    READY = "ready"
    LEASED = "leased"
    CHECKING = "checking"
    """Released, and being checked before it may serve again."""
    ENDING = "ending"


@dataclass(slots=True, eq=False, kw_only=True)
class StockItem:
    """One remote sandbox."""

    connection: Connection
    spec: SandboxSpec
    expires_at: float
    """Time at which the provider ends it unless it is extended. On the pool's clock, in seconds."""
    idle_since: float
    fingerprint: str = ""
    """Fingerprint taken when the sandbox was new; empty if it serves once."""
    num_uses: int = 0
    state: StockState = StockState.READY


@dataclass(slots=True, eq=False, repr=False)
class Supply:
    """State of one provider's sandboxes."""

    name: str
    """Name of the provider."""
    _: KW_ONLY
    max_sandboxes: int
    """Most sandboxes alive at once."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    bucket: TokenBucket | None = None
    """None, like the breaker, if holders make sandboxes in their own processes (`local`): only places are counted."""
    breaker: CircuitBreaker | None = None
    cooldown_s: float = 30.0
    """Seconds after reaching a quota until one more sandbox is tried."""
    items: dict[str, StockItem] = field(default_factory=dict)
    num_creating: Counter[SandboxSpec] = field(default_factory=Counter)
    num_places_taken: int = 0
    has_trial_place: bool = False
    last_error: str = ""
    failures: Counter[str] = field(default_factory=Counter)
    _ready: dict[SandboxSpec, deque[StockItem]] = field(default_factory=dict)
    _ceiling: int = field(init=False)
    _grow_at: float = 0.0
    _step: int = 1

    def __post_init__(self) -> None:
        self._ceiling = self.max_sandboxes

    @property
    def is_local(self) -> bool:
        """True if a lease is only a place in the holder's process and this supply makes nothing."""
        return self.bucket is None

    @property
    def num_alive(self) -> int:
        """Sandboxes that count against the provider's quota, including those being made or ended."""
        return len(self.items) + self.num_creating.total() + self.num_places_taken

    @property
    def limit(self) -> int:
        """Maximum number of sandboxes alive at once: lowered when a quota is reached, then raised by 1, 2, 4…"""
        if self._ceiling < self.max_sandboxes and self.clock() >= self._grow_at:
            self._ceiling = min(self.max_sandboxes, self._ceiling + self._step)
            self._step *= 2
            self._grow_at = self.clock() + self.cooldown_s
        return self._ceiling

    @property
    def has_room(self) -> bool:
        return self.num_alive < self.limit

    @property
    def is_on_trial(self) -> bool:
        """True if the cool-down after failures is over and one trial creation is due."""
        return self.breaker is not None and self.breaker.is_on_trial and self.num_creating.total() == 0

    @property
    def is_usable(self) -> bool:
        """False if callers should turn to the next provider instead of waiting for this one."""
        if self.breaker is not None and (self.breaker.is_open or self.breaker.is_on_trial):
            return False
        return self.bucket is None or (self.limit > 0 and self.bucket.wait_s() <= self.cooldown_s)

    @property
    def has_place(self) -> bool:
        """True if a place in a holder's process can be lent now; only one place during the trial after failures."""
        if not self.is_local or not self.has_room or (self.breaker is not None and self.breaker.is_open):
            return False
        return self.is_usable or not self.has_trial_place

    def may_create(self) -> bool:
        """Return True if a creation may start now, and count it against the rate."""
        if self.bucket is None or self.breaker is None or self.breaker.is_open or not self.has_room:
            return False
        if self.breaker.is_on_trial and self.num_creating.total() > 0:
            return False
        return self.bucket.take()

    def next_chance_s(self) -> float:
        """Return the seconds until `may_create` can change by itself."""
        if self.bucket is None or self.breaker is None:
            return float("inf")
        grows_in_s = self._grow_at - self.clock() if self._ceiling < self.max_sandboxes else 0.0
        return max(self.bucket.wait_s(), self.breaker.reopens_in_s, 0.0 if self.has_room else grows_in_s)

    def quota_met(self) -> None:
        """Note that the provider's quota is reached: keep to the current number, and try one more after a while."""
        self._step = 1
        self._ceiling = min(self._ceiling, len(self.items))
        self._grow_at = self.clock() + self.cooldown_s

    def note(self, error: SandboxError, kind: str = "") -> None:
        """Count a failure by its type, or by the given kind."""
        self.failures[kind or type(error).__name__] += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def lend_place(self) -> None:
        """Count a place as lent: its holder makes the sandbox itself."""
        self.num_places_taken += 1
        self.has_trial_place = not self.is_usable

    def return_place(self, *, was_made: bool) -> None:
        """Count a place as returned; `was_made` is False if the holder could not make the sandbox."""
        self.num_places_taken -= 1
        self.has_trial_place = False
        if self.breaker is not None:
            if was_made:
                self.breaker.succeeded()
            else:
                self.breaker.failed()

    def created(self) -> None:
        """Note that a creation succeeded."""
        if self.breaker is not None:
            self.breaker.succeeded()

    def num_ready(self, spec: SandboxSpec) -> int:
        return len(self._ready.get(spec, ()))

    def put_ready(self, item: StockItem) -> None:
        """Make a sandbox available for leases."""
        item.state = StockState.READY
        item.idle_since = self.clock()
        self._ready.setdefault(item.spec, deque()).append(item)

    def take_ready(self, spec: SandboxSpec) -> StockItem | None:
        """Return the sandbox that has waited longest, now leased; None if none is ready."""
        waiting = self._ready.get(spec)
        if not waiting:
            return None
        item = waiting.popleft()
        if not waiting:
            del self._ready[spec]
        item.state = StockState.LEASED
        return item

    def withdraw(self, item: StockItem) -> None:
        """Remove a sandbox from the ready ones, so that it is not leased any more."""
        waiting = self._ready.get(item.spec)
        if waiting and item in waiting:
            waiting.remove(item)
            if not waiting:
                del self._ready[item.spec]

    def idle_items(self) -> Iterator[StockItem]:
        """Yield every ready sandbox, the oldest of each kind first."""
        for waiting in tuple(self._ready.values()):
            yield from tuple(waiting)
