"""What the pool knows of one provider: which sandboxes it has, how many it may have, and whether to ask for more now.

Pure bookkeeping, no I/O: `keeper.py` makes and ends sandboxes by these rules, `pool.py` decides who gets them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum

from rayapp.core.errors import SandboxError
from rayapp.core.types import SandboxSpec
from rayapp.sandbox.leases import Connection
from rayapp.sandbox.pool.breaker import CircuitBreaker
from rayapp.sandbox.pool.bucket import TokenBucket


class State(StrEnum):
    """Where a remote sandbox is in its life."""

    READY = "ready"
    LEASED = "leased"
    CHECKING = "checking"
    """Given back, and being looked at before it may serve again."""
    ENDING = "ending"


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One remote sandbox."""

    connection: Connection
    spec: SandboxSpec
    expires_at: float
    """The provider ends it then, unless extended. On the pool's clock, in seconds."""
    idle_since: float
    fingerprint: str = ""
    """Fingerprint from when it was new; empty when it is never used twice."""
    num_uses: int = 0
    state: State = State.READY


@dataclass(slots=True, eq=False, repr=False)
class Supply:
    """One provider's sandboxes."""

    name: str
    """Of the provider."""
    _: KW_ONLY
    max_sandboxes: int
    """Most sandboxes alive at once."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    bucket: TokenBucket | None = None
    """None, like the breaker, where the holders make sandboxes in their own processes (`local`): only places count."""
    breaker: CircuitBreaker | None = None
    cooldown_s: float = 30.0
    """After a quota was met, how long until one more is tried."""
    members: dict[str, Member] = field(default_factory=dict)
    num_creating: Counter[SandboxSpec] = field(default_factory=Counter)
    num_places_taken: int = 0
    has_trial_place: bool = False
    last_error: str = ""
    failures: Counter[str] = field(default_factory=Counter)
    _ready: dict[SandboxSpec, deque[Member]] = field(default_factory=dict)
    _ceiling: int = field(init=False)
    _grow_at: float = 0.0
    _step: int = 1

    def __post_init__(self) -> None:
        self._ceiling = self.max_sandboxes

    @property
    def is_local(self) -> bool:
        """True where a lease is a place in the holder's process and nothing is made here."""
        return self.bucket is None

    @property
    def num_alive(self) -> int:
        """Sandboxes that count against the provider's quota, those being made or ended included."""
        return len(self.members) + self.num_creating.total() + self.num_places_taken

    @property
    def limit(self) -> int:
        """How many may be alive now: fewer than configured after a quota was met, then 1, 2, 4… more."""
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
        """True when its pause after failures is over and one creation shall show whether it works again."""
        return self.breaker is not None and self.breaker.is_on_trial and self.num_creating.total() == 0

    @property
    def is_usable(self) -> bool:
        """False while callers should not wait for this provider but turn to the next."""
        if self.breaker is not None and (self.breaker.is_open or self.breaker.is_on_trial):
            return False
        return self.bucket is None or (self.limit > 0 and self.bucket.wait_s() <= self.cooldown_s)

    @property
    def has_place(self) -> bool:
        """True when a place in a holder's process can be lent now; one only while that is the trial after failures."""
        if not self.is_local or not self.has_room or (self.breaker is not None and self.breaker.is_open):
            return False
        return self.is_usable or not self.has_trial_place

    def may_create(self) -> bool:
        """True when a creation may start now; it has then been counted against the rate."""
        if self.bucket is None or self.breaker is None or self.breaker.is_open or not self.has_room:
            return False
        if self.breaker.is_on_trial and self.num_creating.total() > 0:
            return False
        return self.bucket.take()

    def next_chance_s(self) -> float:
        """Seconds until `may_create` can change by itself."""
        if self.bucket is None or self.breaker is None:
            return float("inf")
        grows_in_s = self._grow_at - self.clock() if self._ceiling < self.max_sandboxes else 0.0
        return max(self.bucket.wait_s(), self.breaker.reopens_in_s, 0.0 if self.has_room else grows_in_s)

    def quota_met(self) -> None:
        """Note that the provider refuses more than there are: keep to that number, and try one more after a while."""
        self._step = 1
        self._ceiling = min(self._ceiling, len(self.members))
        self._grow_at = self.clock() + self.cooldown_s

    def note(self, error: SandboxError, kind: str = "") -> None:
        """Count a failure, by its type or by what failed."""
        self.failures[kind or type(error).__name__] += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def lend_place(self) -> None:
        """Count a place as lent: its holder makes a sandbox itself."""
        self.num_places_taken += 1
        self.has_trial_place = not self.is_usable

    def return_place(self, *, was_made: bool) -> None:
        """A holder gives its place back; `was_made` is False if it could not make the sandbox."""
        self.num_places_taken -= 1
        self.has_trial_place = False
        if self.breaker is not None:
            if was_made:
                self.breaker.succeeded()
            else:
                self.breaker.failed()

    def created(self) -> None:
        """Note that a creation came through."""
        if self.breaker is not None:
            self.breaker.succeeded()

    def num_ready(self, spec: SandboxSpec) -> int:
        return len(self._ready.get(spec, ()))

    def put_ready(self, member: Member) -> None:
        """Let a sandbox be leased from now on."""
        member.state = State.READY
        member.idle_since = self.clock()
        self._ready.setdefault(member.spec, deque()).append(member)

    def take_ready(self, spec: SandboxSpec) -> Member | None:
        """The sandbox that has waited longest, now leased; None if there is none."""
        waiting = self._ready.get(spec)
        if not waiting:
            return None
        member = waiting.popleft()
        if not waiting:
            del self._ready[spec]
        member.state = State.LEASED
        return member

    def withdraw(self, member: Member) -> None:
        """Take a sandbox out of the ready ones: it will not be leased any more."""
        waiting = self._ready.get(member.spec)
        if waiting and member in waiting:
            waiting.remove(member)
            if not waiting:
                del self._ready[member.spec]

    def idle_members(self) -> Iterator[Member]:
        """Every ready sandbox, of each kind the oldest first."""
        for waiting in tuple(self._ready.values()):
            yield from tuple(waiting)
