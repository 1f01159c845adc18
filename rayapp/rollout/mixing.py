"""Which of a run's sources a group is of: a pure function of the ratios, the run's seed and the group's id.

    round 0: A B A C A B A x …   round 1: the same, but for the slots x whose owners have changed

Groups come in rounds of 100. A source of share p owns floor(100 p) slots of a round, the same in every round; the slots
that are left belong in each round to those sources that lack most, one each. So a source's number in 100 groups in a
row, wherever they begin, is 100 p rounded down or up, and over the run it is off by no more than a few groups. An order
that is within one group over windows of *every* length exists for two sources, but not for three (Fraenkel).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

import numpy as np

ROUND = 100


class Mixing:
    """See the module.

    Args:
        ratios: how many groups of each source come to one of another's; above 0, of any sum.
    """

    def __init__(self, ratios: Sequence[float], *, seed: int) -> None:
        # Decimals as they were written: 0.1 is a tenth.
        exact = [Fraction(str(ratio)) for ratio in ratios]
        denominator = lcm(*(ratio.denominator for ratio in exact))
        self._weights = [int(ratio * denominator) for ratio in exact]
        self._total = sum(self._weights)
        self._fixed = [ROUND * weight // self._total for weight in self._weights]
        self._num_free = ROUND - sum(self._fixed)
        self._slots = _spread([*self._fixed, self._num_free])
        self._first = int(np.random.SeedSequence((seed, len(ratios))).generate_state(1)[0]) % ROUND
        self._before: list[tuple[int, ...]] = [(0,) * len(ratios)]
        """For each round, groups of each source before it."""
        self._owners: list[tuple[int, ...]] = []
        """For each round but the last of `_before`, the source that owns each of the free slots."""
        self._with_owners = functools.lru_cache(maxsize=64)(self._slots_of)

    def place(self, group_id: int) -> tuple[int, int]:
        """The index of the group's source, and how many groups of that source come before it in the run."""
        number, slot = divmod(self._first + group_id, ROUND)
        owned = self._round(number)
        source = owned[slot]
        count = self._before[number][source] + owned[:slot].count(source)
        return source, count - self._round(0)[: self._first].count(source)

    def _round(self, number: int) -> tuple[int, ...]:
        """Source of each slot of a round."""
        while len(self._owners) <= number:
            self._add_round()
        return self._with_owners(self._owners[number])

    def _add_round(self) -> None:
        certain = [count + fixed for count, fixed in zip(self._before[-1], self._fixed, strict=True)]
        due = [len(self._before) * ROUND * weight for weight in self._weights]
        # A source whose share is a whole number of slots never gets one more.
        waiting = [index for index, weight in enumerate(self._weights) if ROUND * weight % self._total]
        waiting.sort(key=lambda index: certain[index] * self._total - due[index])
        lucky = set(waiting[: self._num_free])
        self._owners.append(_handed_over(self._owners[-1] if self._owners else (), lucky))
        self._before.append(tuple(count + (index in lucky) for index, count in enumerate(certain)))

    def _slots_of(self, owners: tuple[int, ...]) -> tuple[int, ...]:
        free, waiting = len(self._fixed), iter(owners)
        return tuple(next(waiting) if slot == free else slot for slot in self._slots)


def _handed_over(owners: Sequence[int], now: set[int]) -> tuple[int, ...]:
    """Owners of the free slots of a round, from those of the round before: who stays keeps its slot."""
    coming = iter(sorted(now.difference(owners)))
    return tuple(owner if owner in now else next(coming) for owner in owners) or tuple(coming)


def _spread(counts: Sequence[int]) -> list[int]:
    """A sequence that holds i `counts[i]` times, each as evenly as it goes: always whoever lags most."""
    total, given = sum(counts), [0] * len(counts)

    def lag(index: int) -> int:
        return len(sequence) * counts[index] - given[index] * total

    sequence: list[int] = []
    for _ in range(total):
        chosen = max((index for index, count in enumerate(counts) if given[index] < count), key=lag)
        given[chosen] += 1
        sequence.append(chosen)
    return sequence
