"""Which prompt the n-th group of a run is, and every seed that follows from it.

All of it is a pure function of (run seed, group id): nothing has to be saved to resume in the middle of an epoch, and a
group that is generated again, after a crash or on another worker, is the same group.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rayapp.config.config import Config
from rayapp.core.types import SamplingParams

MAX_SEED = 2**31 - 1
MAX_TRAJECTORIES_PER_WORKER = 8192
"""At once in one rollout worker: with more, its event loop takes so long for a round that it looks as if it hung."""
ANY_VERSION = -1
"""Policy version of a request that any weights may serve, as in evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """Groups that start together, as one of them knows them: by number, since with a list of all in each a step of n
    groups would send n * n ids. A server admits its requests of a cohort in one go, so that the batches it computes,
    and with them the last bits of its log-probs, don't depend on arrival times."""

    place: int
    """Of this group. Not its id: dynamic sampling leaves gaps in those."""
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One group to be generated.

    Example: with two groups a step, the second of step 3 is
    `GroupRequest(group_id=5, policy_version=2, cohort=Cohort(place=1, size=2))`.
    """

    group_id: int
    policy_version: int
    """The weights that must sample it."""
    cohort: Cohort | None = None
    """Those that it starts together with. None: it waits for nobody."""
    prompt: int | None = None
    """Place of its prompt in the first epoch's order of its source, where that is not the group's own in turn."""
    source: int | None = None
    """Index of its source, where a curriculum chose it. None: as the ratios say."""
    server: int | None = None
    """Index of the server that samples all of it, every turn. None until the driver's `Router` has placed it."""
    has_greedy_baseline: bool = False
    """Its last trajectory is sampled at temperature 0: what ReMax compares the others with."""
    purpose: Literal["group", "eval"] = "group"
    """First word of its requests' ids: evaluation meets training neither in a server's queue nor in its cache."""

    @property
    def place(self) -> int:
        """Which of its source's prompts it samples, counted through all epochs."""
        return self.group_id if self.prompt is None else self.prompt


def prompt_index(group_id: int, *, num_prompts: int, seed: int) -> int:
    """Position of the prompt that group `group_id` samples: each epoch is one seeded permutation of all prompts."""
    return index_in_epochs(group_id, number=num_prompts, seed=seed, what="prompt-order")


def index_in_epochs(place: int, *, number: int, seed: int, what: str) -> int:
    """Which of `number` things comes at this place, where each epoch is one seeded permutation of all of them.

    Args:
        what: kind of the things: two kinds have orders of their own under one seed.
    """
    epoch, position = divmod(place, number)
    return _order_of_epoch(what, epoch, number, seed)[position]


@functools.lru_cache(maxsize=4)
def _order_of_epoch(what: str, epoch: int, number: int, seed: int) -> tuple[int, ...]:
    order = list(range(number))
    random.Random(f"{what}:{seed}:{epoch}").shuffle(order)
    return tuple(order)


def sampling_seed(group_id: int, index: int, *, seed: int) -> int:
    """Seed of the `index`-th trajectory of a group."""
    return _mix(seed, group_id, 1 + index)


def sampling_of(
    request: GroupRequest, sampling: SamplingParams, index: int, *, group_size: int, seed: int
) -> SamplingParams:
    """How the `index`-th trajectory of a group is sampled, where all are sampled by `sampling`."""
    own = replace(sampling, seed=sampling_seed(request.group_id, index, seed=seed))
    return replace(own, temperature=0.0) if request.has_greedy_baseline and index == group_size - 1 else own


def scoring_seed(group_id: int, *, seed: int) -> int:
    """Seed that draws a group's hidden tests: the same for all its trajectories, which are compared with each other."""
    return _mix(seed, group_id, 0)


def seed_of_call(seed: int, number: int) -> int:
    """Seed of an external agent's call, from its trajectory's."""
    return _mix(seed, number)


def evaluation_seed(seed: int) -> int:
    """Run seed under which evaluation samples and draws tests: apart from everything that training sees."""
    return _mix(seed, MAX_SEED)


def is_first_turn(request_id: str) -> bool:
    """True for a completion that stands alone and for turn 0 of an episode, whose ids end in `/turn=N`."""
    turn = request_id.rpartition("/turn=")[2]
    return "/turn=" not in request_id or int(turn) == 0


def evaluation_waves(config: Config, num_prompts: int) -> list[tuple[int, ...]]:
    """The prompts of an evaluation in parts that run at once: each as many trajectories as a training step at most,
    which is what servers, tools and sandboxes are laid out for."""
    at_once = min(config.train.groups_per_step * config.rollout.group_size, _max_trajectories(config))
    size = max(1, at_once // config.eval.samples_per_task)
    return [tuple(range(start, min(start + size, num_prompts))) for start in range(0, num_prompts, size)]


def max_groups_at_once(config: Config) -> int:
    """So many of a training's groups may be with the rollout workers; others wait in the driver."""
    return max(1, _max_trajectories(config) // config.rollout.group_size)


def _max_trajectories(config: Config) -> int:
    return config.rollout.num_workers * MAX_TRAJECTORIES_PER_WORKER


def _mix(*words: int) -> int:
    # SeedSequence and not a sum: seeds of neighbouring groups and runs must not collide.
    return int(np.random.SeedSequence(words).generate_state(1, np.uint32)[0] & MAX_SEED)


def server_in_cohort(cohort: Cohort, num_servers: int) -> int:
    """Index of the server that samples the group at this place."""
    return cohort.place % num_servers


def neighbours(cohort: Cohort | None, num_servers: int) -> int:
    """Groups of the cohort that this one's server admits together, itself included; 1 without a cohort."""
    if cohort is None:
        return 1
    return len(range(server_in_cohort(cohort, num_servers), cohort.size, num_servers))
