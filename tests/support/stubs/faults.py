"""Faults of a stub server, chosen for one call.

drop       the connection closes before anything was done
lost       it was done, and the connection closes without an answer
429, 500, 502, 503     an error answer; 429 with Retry-After
hang       no answer at all
garbage    an answer that makes no sense
die        the sandbox ends while the call is under way
cut        the answer breaks off in the middle
slow       the answer comes late, but comes
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque


class Faults:
    """Chooses the fault of a call, if any.

    Args:
        hang_s: how long a call that hangs keeps its connection.
        slow_s: how late a slow answer is.
    """

    def __init__(self, *, hang_s: float = 60.0, slow_s: float = 0.3) -> None:
        self.hang_s = hang_s
        self.slow_s = slow_s
        self.retry_after_s = 1
        self.injected: Counter[str] = Counter()
        self._told: defaultdict[str, deque[str]] = defaultdict(deque)

    def next(self, call: str, *faults: str) -> None:
        """Let the next calls of this name (create, list, kill, start, execute…) fail with these faults, one after the
        other."""
        self._told[call].extend(faults)

    def choose(self, call: str) -> str:
        """Return the fault of this call; empty for none."""
        if not self._told[call]:
            return ""
        fault = self._told[call].popleft()
        self.injected[f"{call}:{fault}"] += 1
        return fault
