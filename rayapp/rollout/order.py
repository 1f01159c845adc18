"""Determines the source, the prompt and all seeds of the n-th group of a run.

All are pure functions of (run seed, group id): a resumed run needs no saved state, and a group that is generated again
is the same group.

`Mixing` chooses sources in rounds of 100 slots. A source with share p has floor(100 p) fixed slots; each remaining slot
of a round goes to a source that is furthest behind. So among any 100 consecutive groups a source has 100 p groups,
rounded. (At most one wrong over windows of *every* length is possible for two sources, not for three: Fraenkel.)
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import Literal

import numpy as np

from rayapp.config.sections import RolloutSection
from rayapp.core.types import SamplingParams

MAX_SEED = 2**31 - 1
MAX_TRAJECTORIES_PER_WORKER = 8192  # with more, one pass of a worker's event loop takes so long that it seems to hang
ANY_VERSION = -1  # `policy_version` of requests that may be sampled with any weights, as in evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """The groups that start together, by their number, and a group's place among them.

    A server admits its requests of a cohort together, so that its batches, and the last bits of its log-probs, don't
    depend on arrival times.
    """

    place: int  # does not follow from the group's id: dynamic sampling leaves gaps
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Request to generate one group.

    Example: with two groups a step, the second of step 3 is `GroupRequest(group_id=5, policy_version=2,
    cohort=Cohort(place=1, size=2))`.
    """

    group_id: int
    policy_version: int  # that must sample the group
    cohort: Cohort | None = None  # None if the group starts alone
    # Position in its source's order, counted through all epochs; None until `Sources.of` has found the source.
    prompt: int | None = None
    server: int | None = None  # samples all turns; None until the driver's `Router` has chosen it
    # ReMax: the last trajectory is sampled at temperature 0, as the baseline of the others
    has_greedy_baseline: bool = False
    purpose: Literal["group", "eval"] = "group"

    @property
    def place(self) -> int:
        """Return `prompt`, or in a run with one source the group's id."""
        return self.group_id if self.prompt is None else self.prompt


def prompt_index(group_id: int, *, num_prompts: int, seed: int) -> int:
    """Return the index of the prompt of group `group_id`. Each epoch is one seeded permutation of all prompts."""
    return index_in_epochs(group_id, number=num_prompts, seed=seed, what="prompt-order")


def index_in_epochs(place: int, *, number: int, seed: int, what: str) -> int:
    """Return the index of the item at `place` of an endless sequence; each epoch is one seeded permutation of `number`
    items. Under one seed, each kind `what` has its own order."""
    epoch, position = divmod(place, number)
    return _order_of_epoch(what, epoch, number, seed)[position]


@functools.lru_cache(maxsize=4)
def _order_of_epoch(what: str, epoch: int, number: int, seed: int) -> tuple[int, ...]:
    order = list(range(number))
    random.Random(f"{what}:{seed}:{epoch}").shuffle(order)
    return tuple(order)


def sampling_seed(group_id: int, index: int, *, seed: int) -> int:
    return _mix(seed, group_id, 1 + index)


def sampling_of(
    request: GroupRequest, sampling: SamplingParams, index: int, *, group_size: int, seed: int
) -> SamplingParams:
    """Return the settings of a group's `index`-th trajectory, made from the group's settings `sampling`."""
    own = replace(sampling, seed=sampling_seed(request.group_id, index, seed=seed))
    return replace(own, temperature=0.0) if request.has_greedy_baseline and index == group_size - 1 else own


def scoring_seed(group_id: int, *, seed: int) -> int:
    """Return the seed that draws the hidden tests of all trajectories of a group."""
    return _mix(seed, group_id, 0)


def seed_of_call(seed: int, number: int) -> int:
    """Return the seed of call `number` of an external agent, made from its trajectory's seed."""
    return _mix(seed, number)


def evaluation_seed(seed: int) -> int:
    """Return the seed of evaluation, whose samples and tests differ from training's."""
    return _mix(seed, MAX_SEED)


def evaluation_waves(
    num_prompts: int, rollout: RolloutSection, groups_per_step: int, samples_per_task: int
) -> list[tuple[int, ...]]:
    """Split the prompts of an evaluation into waves, which run one after the other. A wave has at most as many
    trajectories as a training step: servers, tools and sandboxes are configured for this load."""
    at_once = min(groups_per_step * rollout.group_size, rollout.num_workers * MAX_TRAJECTORIES_PER_WORKER)
    size = max(1, at_once // samples_per_task)
    return [tuple(range(start, min(start + size, num_prompts))) for start in range(0, num_prompts, size)]


def max_groups_at_once(rollout: RolloutSection) -> int:
    """Return the maximum number of groups that the rollout workers run at once. Further groups wait in the driver."""
    return max(1, rollout.num_workers * MAX_TRAJECTORIES_PER_WORKER // rollout.group_size)


def _mix(*words: int) -> int:
    # Mix with SeedSequence: with sums, neighbouring groups and runs would have the same seeds.
    return int(np.random.SeedSequence(words).generate_state(1, np.uint32)[0] & MAX_SEED)


def server_in_cohort(cohort: Cohort, num_servers: int) -> int:
    return cohort.place % num_servers


def neighbours(cohort: Cohort | None, num_servers: int) -> int:
    """Return the number of groups that the group's server admits together, at least 1."""
    if cohort is None:
        return 1
    return len(range(server_in_cohort(cohort, num_servers), cohort.size, num_servers))


ROUND = 100


class Mixing:
    """Determines the source of each group of a run, as described above. `ratios` may have any sum."""

    def __init__(self, ratios: Sequence[float], *, seed: int) -> None:
        # Convert from the decimal text, so that 0.1 is exactly a tenth.
        exact = [Fraction(str(ratio)) for ratio in ratios]
        denominator = lcm(*(ratio.denominator for ratio in exact))
        self._weights = [int(ratio * denominator) for ratio in exact]
        self._total = sum(self._weights)
        self._fixed = [ROUND * weight // self._total for weight in self._weights]
        self._num_free = ROUND - sum(self._fixed)
        self._slots = _spread([*self._fixed, self._num_free])
        self._first = int(np.random.SeedSequence((seed, len(ratios))).generate_state(1)[0]) % ROUND
        self._before: list[tuple[int, ...]] = [(0,) * len(ratios)]  # groups that each source has before a round
        self._owners: list[tuple[int, ...]] = []  # of each round's remaining slots; one round fewer than `_before`
        self._with_owners = functools.lru_cache(maxsize=64)(self._slots_of)

    def place(self, group_id: int) -> tuple[int, int]:
        """Return the index of the group's source, and the number of earlier groups of that source in the run."""
        number, slot = divmod(self._first + group_id, ROUND)
        owned = self._round(number)
        source = owned[slot]
        count = self._before[number][source] + owned[:slot].count(source)
        return source, count - self._round(0)[: self._first].count(source)

    def _round(self, number: int) -> tuple[int, ...]:
        while len(self._owners) <= number:
            self._add_round()
        return self._with_owners(self._owners[number])

    def _add_round(self) -> None:
        certain = [count + fixed for count, fixed in zip(self._before[-1], self._fixed, strict=True)]
        due = [len(self._before) * ROUND * weight for weight in self._weights]
        # A source whose share is a whole number of slots never gets a remaining slot.
        waiting = [index for index, weight in enumerate(self._weights) if ROUND * weight % self._total]
        waiting.sort(key=lambda index: certain[index] * self._total - due[index])
        lucky = set(waiting[: self._num_free])
        self._owners.append(_handed_over(self._owners[-1] if self._owners else (), lucky))
        self._before.append(tuple(count + (index in lucky) for index, count in enumerate(certain)))

    def _slots_of(self, owners: tuple[int, ...]) -> tuple[int, ...]:
        free, waiting = len(self._fixed), iter(owners)
        return tuple(next(waiting) if slot == free else slot for slot in self._slots)


def _handed_over(owners: Sequence[int], now: set[int]) -> tuple[int, ...]:
    # A source that gets a slot again keeps its slot.
    coming = iter(sorted(now.difference(owners)))
    return tuple(owner if owner in now else next(coming) for owner in owners) or tuple(coming)


def _spread(counts: Sequence[int]) -> list[int]:
    """Return each index i `counts[i]` times; the next is always the one furthest behind its share."""
    total, given = sum(counts), [0] * len(counts)

    def lag(index: int) -> int:
        return len(sequence) * counts[index] - given[index] * total

    sequence: list[int] = []
    for _ in range(total):
        chosen = max((index for index, count in enumerate(counts) if given[index] < count), key=lag)
        given[chosen] += 1
        sequence.append(chosen)
    return sequence
