"""State of one provider: its sandboxes, their maximum number, and whether another may be created now. No I/O."""

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

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0  # after a failure, and after many in a row
_QUOTA_PAUSE_S = 30.0  # after the provider's quota was reached, before more sandboxes are tried
CREATE_TIMEOUT_S = 90.0  # for a new sandbox
IDLE_TIMEOUT_S = 300.0  # after which a sandbox beyond `min_ready` is ended, because it costs money


class StockState(StrEnum):
    READY = "ready"
    LEASED = "leased"
    CHECKING = "checking"  # released, and checked before it may be leased again
    ENDING = "ending"


@dataclass(slots=True, eq=False, kw_only=True)
class StockItem:
    connection: Connection
    spec: SandboxSpec
    expires_at: float  # on the pool's clock, unless its life is extended
    idle_since: float
    fingerprint: str = ""  # of the new sandbox; empty if it is used only once
    num_uses: int = 0
    state: StockState = StockState.READY


@dataclass(slots=True, eq=False, repr=False)
class Supply:
    name: str  # of the provider
    _: KW_ONLY
    max_sandboxes: int  # alive at once
    clock: Callable[[], float]
    bucket: TokenBucket  # rate of creations
    items: dict[str, StockItem] = field(default_factory=dict)
    num_creating: Counter[SandboxSpec] = field(default_factory=Counter)
    num_failed: int = 0  # creations since the last one that succeeded
    last_error: str = ""
    failures: Counter[str] = field(default_factory=Counter)
    _ready: dict[SandboxSpec, deque[StockItem]] = field(default_factory=dict)
    _quota: int = 0
    _quota_until: float = 0.0

    @property
    def num_alive(self) -> int:
        """Number of sandboxes that count against the provider's quota, including those being made or ended."""
        return len(self.items) + self.num_creating.total()

    @property
    def limit(self) -> int:
        """Current maximum of living sandboxes: lower for a while after the provider's quota was reached."""
        return self._quota if self.clock() < self._quota_until else self.max_sandboxes

    @property
    def has_room(self) -> bool:
        return self.num_alive < self.limit

    def may_create(self) -> bool:
        """True if a creation may start now; it is then counted against the rate limit."""
        return self.has_room and self.bucket.take()

    def next_chance_s(self) -> float:
        """Return the seconds until `may_create` can return True, if no sandbox ends meanwhile."""
        return max(self.bucket.wait_s(), 0.0 if self.has_room else self._quota_until - self.clock())

    def quota_met(self) -> None:
        """Record that the quota is reached: allow no more than the current number of sandboxes for a while."""
        self._quota, self._quota_until = len(self.items), self.clock() + _QUOTA_PAUSE_S

    def note(self, error: SandboxError, kind: str = "") -> None:
        self.failures[kind or type(error).__name__] += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def failed(self, retry_after_s: float | None) -> None:
        """Pause after a failed creation. The pauses grow, with a random part: many pools must not retry at the same
        moment."""
        longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self.num_failed, 10))
        self.num_failed += 1
        self.bucket.block_for(max(longest_s * random.uniform(0.5, 1.0), retry_after_s or 0.0))

    def num_ready(self, spec: SandboxSpec) -> int:
        return len(self._ready.get(spec, ()))

    def put_ready(self, item: StockItem) -> None:
        item.state = StockState.READY
        item.idle_since = self.clock()
        self._ready.setdefault(item.spec, deque()).append(item)

    def take_ready(self, spec: SandboxSpec) -> StockItem | None:
        """Return the sandbox that has been ready for the longest time, now leased; None if none is ready."""
        waiting = self._ready.get(spec)
        if not waiting:
            return None
        item = waiting.popleft()
        if not waiting:
            del self._ready[spec]
        item.state = StockState.LEASED
        return item

    def withdraw(self, item: StockItem) -> None:
        waiting = self._ready.get(item.spec)
        if waiting and item in waiting:
            waiting.remove(item)
            if not waiting:
                del self._ready[item.spec]

    def idle_items(self) -> Iterator[StockItem]:
        """Yield every ready sandbox. Those of one kind come oldest first."""
        for waiting in tuple(self._ready.values()):
            yield from tuple(waiting)
