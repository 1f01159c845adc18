"""State of one provider: its sandboxes, their maximum number, and whether another may be created now.

No I/O: `stock.py` makes and ends sandboxes by these rules; `pool.py` decides which caller gets a sandbox. A circuit
breaker stops calls to a failing provider for a while.
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

    While the breaker is closed, calls are allowed, with a growing pause after each failure. While it is open, no call
    is allowed. After the cool-down one trial call is allowed, whose outcome closes the breaker or opens it again.

    Args:
        failures: number of failures, one after the other, that open the breaker. cooldown_s: seconds for which the
            breaker first stays open. Each failed trial doubles them, up to ten minutes. clock: function that returns
            monotonic
        seconds. rng: random source for the pauses, so that many pools do not retry at the same moment.
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
        """True while no call is allowed."""
        return self._open_until is not None and self._clock() < self._open_until

    @property
    def is_on_trial(self) -> bool:
        """True when the cool-down is over: one call may be made, and its outcome closes or reopens the breaker."""
        return self._open_until is not None and not self.is_open

    @property
    def reopens_in_s(self) -> float:
        """Seconds until a call is allowed; 0 if it is allowed now."""
        return max(0.0, self._open_until - self._clock()) if self._open_until is not None else 0.0

    def succeeded(self) -> None:
        """Record that a call succeeded: close the breaker and forget past failures."""
        self._num_failed = 0
        self._open_until = None
        self._next_cooldown_s = self._cooldown_s

    def failed(self) -> float:
        """Record that a call failed. Return the seconds until the next call is allowed. Until the breaker opens, they
        grow exponentially, with a random part.
        """
        was_on_trial = self.is_on_trial
        self._num_failed += 1
        if was_on_trial or (self._open_until is None and self._num_failed >= self._failures):
            self._open_until = self._clock() + self._next_cooldown_s * self._rng.uniform(1.0, 1.2)
            self._next_cooldown_s = min(MAX_COOLDOWN_S, self._next_cooldown_s * 2)
        exponent = min(self._num_failed, 10) - 1
        return float(min(FIRST_BACKOFF_S * 2**exponent, self._cooldown_s) * self._rng.uniform(0.5, 1.0))


class StockState(StrEnum):
    """State of a remote sandbox."""

    READY = "ready"
    LEASED = "leased"
    CHECKING = "checking"
    """The sandbox was released, and is checked before it may be leased again."""
    ENDING = "ending"


@dataclass(slots=True, eq=False, kw_only=True)
class StockItem:
    """One remote sandbox in the pool."""

    connection: Connection
    spec: SandboxSpec
    expires_at: float
    """Time at which the provider ends the sandbox unless its life is extended, in seconds on the pool's clock."""
    idle_since: float
    fingerprint: str = ""
    """Fingerprint (`stock.fingerprint`) of the new sandbox; empty if the sandbox is used only once."""
    num_uses: int = 0
    state: StockState = StockState.READY


@dataclass(slots=True, eq=False, repr=False)
class Supply:
    """State of one provider's sandboxes."""

    name: str
    """Name of the provider."""
    _: KW_ONLY
    max_sandboxes: int
    """Maximum number of sandboxes alive at the same time."""
    clock: Callable[[], float]
    """Function that returns monotonic seconds."""
    bucket: TokenBucket | None = None
    """Rate limit of creations. For the provider `local`, whose sandboxes the lease holders make, it is None."""
    breaker: CircuitBreaker | None = None
    cooldown_s: float = 30.0
    """Seconds to wait, after the provider's quota was reached, before one more sandbox is tried."""
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
        """True if lease holders make the sandboxes in their own processes. This supply then only counts them."""
        return self.bucket is None

    @property
    def num_alive(self) -> int:
        """Number of sandboxes that count against the provider's quota, including those being made or ended."""
        return len(self.items) + self.num_creating.total() + self.num_places_taken

    @property
    def limit(self) -> int:
        """Current maximum number of living sandboxes. It is lowered when the provider's quota is reached, then raised
        by 1, 2, 4….
        """
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
        """True if the cool-down after failures is over and the trial creation has not started."""
        return self.breaker is not None and self.breaker.is_on_trial and self.num_creating.total() == 0

    @property
    def is_usable(self) -> bool:
        """True if callers should wait for this provider, False if they should use the next one."""
        if self.breaker is not None and (self.breaker.is_open or self.breaker.is_on_trial):
            return False
        return self.bucket is None or (self.limit > 0 and self.bucket.wait_s() <= self.cooldown_s)

    @property
    def has_place(self) -> bool:
        """True if a lease holder may make a local sandbox now. In the trial after failures only one holder may make
        one.
        """
        if not self.is_local or not self.has_room or (self.breaker is not None and self.breaker.is_open):
            return False
        return self.is_usable or not self.has_trial_place

    def may_create(self) -> bool:
        """Return True if a creation may start now. The creation is then counted against the rate limit."""
        if self.bucket is None or self.breaker is None or self.breaker.is_open or not self.has_room:
            return False
        if self.breaker.is_on_trial and self.num_creating.total() > 0:
            return False
        return self.bucket.take()

    def next_chance_s(self) -> float:
        """Return the seconds until `may_create` can return True, if no sandbox ends meanwhile."""
        if self.bucket is None or self.breaker is None:
            return float("inf")
        grows_in_s = self._grow_at - self.clock() if self._ceiling < self.max_sandboxes else 0.0
        return max(self.bucket.wait_s(), self.breaker.reopens_in_s, 0.0 if self.has_room else grows_in_s)

    def quota_met(self) -> None:
        """Record that the provider's quota is reached: limit the number of sandboxes to the current one, and try one
        more later.
        """
        self._step = 1
        self._ceiling = min(self._ceiling, len(self.items))
        self._grow_at = self.clock() + self.cooldown_s

    def note(self, error: SandboxError, kind: str = "") -> None:
        """Count a failure by its type, or by the given kind."""
        self.failures[kind or type(error).__name__] += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def lend_place(self) -> None:
        """Count a local sandbox that a lease holder is about to make."""
        self.num_places_taken += 1
        self.has_trial_place = not self.is_usable

    def return_place(self, *, was_made: bool) -> None:
        """Count a local sandbox as ended. `was_made` is False if the lease holder could not make the sandbox."""
        self.num_places_taken -= 1
        self.has_trial_place = False
        if self.breaker is not None:
            if was_made:
                self.breaker.succeeded()
            else:
                self.breaker.failed()

    def created(self) -> None:
        """Record that a creation succeeded."""
        if self.breaker is not None:
            self.breaker.succeeded()

    def num_ready(self, spec: SandboxSpec) -> int:
        return len(self._ready.get(spec, ()))

    def put_ready(self, item: StockItem) -> None:
        """Mark a sandbox as ready, so that it can be leased."""
        item.state = StockState.READY
        item.idle_since = self.clock()
        self._ready.setdefault(item.spec, deque()).append(item)

    def take_ready(self, spec: SandboxSpec) -> StockItem | None:
        """Return the sandbox that has been ready for the longest time, and mark it as leased; None if no sandbox is
        ready.
        """
        waiting = self._ready.get(spec)
        if not waiting:
            return None
        item = waiting.popleft()
        if not waiting:
            del self._ready[spec]
        item.state = StockState.LEASED
        return item

    def withdraw(self, item: StockItem) -> None:
        """Remove a sandbox from the ready ones, so that it can't be leased."""
        waiting = self._ready.get(item.spec)
        if waiting and item in waiting:
            waiting.remove(item)
            if not waiting:
                del self._ready[item.spec]

    def idle_items(self) -> Iterator[StockItem]:
        """Yield every ready sandbox. Those of one kind come oldest first."""
        for waiting in tuple(self._ready.values()):
            yield from tuple(waiting)
