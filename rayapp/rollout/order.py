"""Determines the source, the prompt and all seeds of the n-th group of a run.

Prompt and seeds are pure functions of (run seed, group id). Therefore a run that resumes in the middle of an epoch
needs no saved state, and a group that is generated again, after a crash or on another worker, is the same group.

`Mixing` determines a group's source, which is a pure function of the ratios, the run's seed and the group's id.

    round 0: A B A C A B A x …   round 1: the same sequence, but the slots x go to other sources

Groups come in rounds of 100 slots. A source with share p has floor(100 p) fixed slots, which are the same in every
round. Each remaining slot of a round goes to one of the sources that are furthest behind their share. So among any 100
consecutive groups a source has 100 p groups, rounded down or up, and over the whole run its number of groups is wrong
by only a few. (An order that is wrong by at most one group over windows of *every* length exists for two sources, but
not for three: Fraenkel.)
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

from rayapp.config.config import Config
from rayapp.core.types import SamplingParams

MAX_SEED = 2**31 - 1
MAX_TRAJECTORIES_PER_WORKER = 8192
"""Maximum number of concurrent trajectories in one rollout worker. With more, one pass of the worker's event loop takes
so long that the worker seems to hang."""
ANY_VERSION = -1
"""Value of `policy_version` in requests that may be sampled with any weights, as in evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """Cohort of a group, which is the set of groups that start together. It is given by its size and the group's place
    in it.

    A server admits its requests of a cohort together, so that its batches, and the last bits of its log-probs, don't
    depend on arrival times. A cohort has no list of ids: in a step of n groups, n lists of n ids would have to be sent.
    """

    place: int
    """Index of this group in its cohort. It does not follow from the group's id, because dynamic sampling leaves gaps
    in ids."""
    size: int
    """Number of groups in the cohort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Request to generate one group.

    Example: with two groups a step, the second of step 3 is
    `GroupRequest(group_id=5, policy_version=2, cohort=Cohort(place=1, size=2))`.
    """

    group_id: int
    policy_version: int
    """Policy version that must sample the group."""
    cohort: Cohort | None = None
    """Cohort of the group; None if the group starts alone."""
    prompt: int | None = None
    """Position of the group's prompt in the order of its source, counted through all epochs. None until `Sources.of`
    has found the source."""
    server: int | None = None
    """Index of the server that samples all turns. None until the driver's `Router` has chosen a server."""
    has_greedy_baseline: bool = False
    """True if the group's last trajectory is sampled at temperature 0. In ReMax it is the baseline of the others."""
    purpose: Literal["group", "eval"] = "group"
    """`group` for training, `eval` for evaluation."""

    @property
    def place(self) -> int:
        """Return `prompt`, or in a run with one source the group's id."""
        return self.group_id if self.prompt is None else self.prompt


def prompt_index(group_id: int, *, num_prompts: int, seed: int) -> int:
    """Return the index of the prompt of group `group_id`. Each epoch is one seeded permutation of all prompts."""
    return index_in_epochs(group_id, number=num_prompts, seed=seed, what="prompt-order")


def index_in_epochs(place: int, *, number: int, seed: int, what: str) -> int:
    """Return the index of the item at position `place` of an endless sequence. Each epoch of the sequence is one seeded
    permutation of `number` items.

    Args:
        what: kind of the items. Under one seed, each kind has its own order.
    """
    epoch, position = divmod(place, number)
    return _order_of_epoch(what, epoch, number, seed)[position]


@functools.lru_cache(maxsize=4)
def _order_of_epoch(what: str, epoch: int, number: int, seed: int) -> tuple[int, ...]:
    order = list(range(number))
    random.Random(f"{what}:{seed}:{epoch}").shuffle(order)
    return tuple(order)


def sampling_seed(group_id: int, index: int, *, seed: int) -> int:
    """Return the seed of the `index`-th trajectory of a group."""
    return _mix(seed, group_id, 1 + index)


def sampling_of(
    request: GroupRequest, sampling: SamplingParams, index: int, *, group_size: int, seed: int
) -> SamplingParams:
    """Return the settings of a group's `index`-th trajectory, made from the group's settings `sampling`."""
    own = replace(sampling, seed=sampling_seed(request.group_id, index, seed=seed))
    return replace(own, temperature=0.0) if request.has_greedy_baseline and index == group_size - 1 else own


def scoring_seed(group_id: int, *, seed: int) -> int:
    """Return the seed that draws a group's hidden tests. All trajectories of the group get the same tests, so that
    their rewards can be compared.
    """
    return _mix(seed, group_id, 0)


def seed_of_call(seed: int, number: int) -> int:
    """Return the seed of call `number` of an external agent, made from its trajectory's seed."""
    return _mix(seed, number)


def evaluation_seed(seed: int) -> int:
    """Return the seed that evaluation uses instead of the run's seed. Its samples and tests differ from those of
    training.
    """
    return _mix(seed, MAX_SEED)


def evaluation_waves(config: Config, num_prompts: int) -> list[tuple[int, ...]]:
    """Split the prompts of an evaluation into waves, which run one after the other. Return the prompts' indices for
    each wave.

    A wave has at most as many trajectories as a training step, because servers, tools and sandboxes are configured for
    this load.
    """
    at_once = min(config.train.groups_per_step * config.rollout.group_size, _max_trajectories(config))
    size = max(1, at_once // config.eval.samples_per_task)
    return [tuple(range(start, min(start + size, num_prompts))) for start in range(0, num_prompts, size)]


def max_groups_at_once(config: Config) -> int:
    """Return the maximum number of groups that the rollout workers run at once. Further groups wait in the driver."""
    return max(1, _max_trajectories(config) // config.rollout.group_size)


def _max_trajectories(config: Config) -> int:
    return config.rollout.num_workers * MAX_TRAJECTORIES_PER_WORKER


def _mix(*words: int) -> int:
    # Mix with SeedSequence: with sums, neighbouring groups and runs would have the same seeds.
    return int(np.random.SeedSequence(words).generate_state(1, np.uint32)[0] & MAX_SEED)


def server_in_cohort(cohort: Cohort, num_servers: int) -> int:
    """Return the index of the server that samples the group at `cohort.place`."""
    return cohort.place % num_servers


def neighbours(cohort: Cohort | None, num_servers: int) -> int:
    """Return the number of groups, including this group, that the group's server admits together. Without a cohort it
    is 1.
    """
    if cohort is None:
        return 1
    return len(range(server_in_cohort(cohort, num_servers), cohort.size, num_servers))


ROUND = 100


class Mixing:
    """Determines the source of each group of a run, as the module's docstring describes.

    Args:
        ratios: relative share of groups of each source. Positive numbers, whose sum may have any value.
    """

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
        self._before: list[tuple[int, ...]] = [(0,) * len(ratios)]
        """Number of groups that each source has before a round, one tuple per round."""
        self._owners: list[tuple[int, ...]] = []
        """Sources of a round's remaining slots, one tuple per round. This list has one round fewer than `_before`."""
        self._with_owners = functools.lru_cache(maxsize=64)(self._slots_of)

    def place(self, group_id: int) -> tuple[int, int]:
        """Return the index of the group's source, and the number of earlier groups of that source in the run."""
        number, slot = divmod(self._first + group_id, ROUND)
        owned = self._round(number)
        source = owned[slot]
        count = self._before[number][source] + owned[:slot].count(source)
        return source, count - self._round(0)[: self._first].count(source)

    def _round(self, number: int) -> tuple[int, ...]:
        """Return the source of each slot of a round."""
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
    """Return the sources of a round's remaining slots.

    Args:
        owners: sources of the remaining slots in the previous round. A source that gets a slot again keeps its slot.
        now: sources that get one of the slots in this round.
    """
    coming = iter(sorted(now.difference(owners)))
    return tuple(owner if owner in now else next(coming) for owner in owners) or tuple(coming)


def _spread(counts: Sequence[int]) -> list[int]:
    """Return a sequence that has each index i `counts[i]` times, spread evenly. The next element is always the index
    that is furthest behind its share.
    """
    total, given = sum(counts), [0] * len(counts)

    def lag(index: int) -> int:
        return len(sequence) * counts[index] - given[index] * total

    sequence: list[int] = []
    for _ in range(total):
        chosen = max((index for index, count in enumerate(counts) if given[index] < count), key=lag)
        given[chosen] += 1
        sequence.append(chosen)
    return sequence
