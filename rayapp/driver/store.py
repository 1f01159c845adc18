"""The bounded store between rollouts and training, and the ledger of every group that passes through it.

    feed --reserve--> [admitted] --finish--> [ready] --take--> [training] --release--> (trained)
                          |                     |
                          '------- drop --------'            (dropped, with a reason, or refused when finished)

The store holds at most `(max_staleness + 1) * groups_per_step` untrained groups, or `max_in_flight` if that is set.
Only `release` frees slots, and the driver calls it after the new weights have reached every server: if a slot were free
earlier, a prompt would start on weights that are about to be replaced. So a group is never older than `max_staleness`
optimizer steps, and with `max_staleness == 0` this is synchronous GRPO. Pure asyncio, one event loop, no Ray: stored
references are opaque.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rayapp.core.types import GroupSummary
from rayapp.driver.group_rules import EQUAL_REWARDS

RefT = TypeVar("RefT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup(Generic[RefT]):
    """A finished group: its summary, and a reference to it."""

    summary: GroupSummary
    ref: RefT  # in the object store; the driver never resolves it
    ready_at_s: float = field(default_factory=time.monotonic)  # on the monotonic clock


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCounts:
    """Number of groups in each state. Every group is in exactly one state."""

    admitted: int
    ready: int
    training: int
    trained: int
    dropped: int
    issued: int  # ids handed out so far: the sum of the five other counts

    def balances(self) -> bool:
        return self.admitted + self.ready + self.training + self.trained + self.dropped == self.issued


class TrajectoryStore(Generic[RefT]):
    """Store of groups between rollouts and training.

    At most `max_in_flight` groups are untrained (None: `(max_staleness + 1) * groups_per_step`, which is also the upper
    limit), and `num_groups` more are trained on, from policy `version` and `next_group_id` on. `straggler_window`
    groups may overtake one that is still generated, unless it would grow too stale; 0 keeps the order of ids. `waiting`
    and `done_ahead` come from a checkpoint. `refuses` says whether to drop a finished group, by summary and place in
    the step.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        max_in_flight: int | None = None,
        version: int,
        num_groups: int,
        next_group_id: int = 0,
        straggler_window: int = 0,
        waiting: Sequence[StoredGroup[RefT]] = (),
        done_ahead: Collection[int] = (),
        refuses: Callable[[GroupSummary, int], bool] = lambda summary, place: False,
    ) -> None:
        self._refuses = refuses
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._capacity = max_in_flight or (max_staleness + 1) * groups_per_step
        self._num_groups = num_groups
        self._version = version
        self._next_id = next_group_id
        self._step_first_id = next_group_id
        self._straggler_window = straggler_window
        self._num_issued = len(waiting)
        self._admitted: set[int] = set()
        # Version for which each group in generation or ready was admitted, the oldest that can have sampled it.
        self._admitted_for: dict[int, int] = _oldest_versions(waiting)
        self._ready: dict[int, StoredGroup[RefT]] = {group.summary.group_id: group for group in waiting}
        self._done_ahead = set(done_ahead)
        # Groups that a checkpoint kept, or counted as done; they are not issued again.
        self._never_again = frozenset((*self._ready, *done_ahead))
        # Number of groups with higher ids that were taken since a group in generation was admitted.
        self._overtaken: Counter[int] = Counter()
        self._training: set[int] = set()
        self._num_trained = 0
        self._dropped_since_release: set[int] = set()
        self.dropped_for: Counter[str] = Counter()
        self.reissued_for: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    @property
    def version(self) -> int:
        """Policy version that generates a group admitted now."""
        return self._version

    async def reserve(self) -> tuple[list[int], int]:
        """Wait for a free slot, then take all, for groups that start together on the same weights. Return their ids,
        and the policy version that must generate them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_free() > 0)
            ids = [self._hand_out() for _ in range(self._num_free())]
            self._admitted.update(ids)
            self._admitted_for.update(dict.fromkeys(ids, self._version))
        return ids, self._version

    def _hand_out(self) -> int:
        group_id = self._upcoming_id()
        self._next_id = group_id + 1
        self._num_issued += 1
        return group_id

    def _upcoming_id(self) -> int:
        group_id = self._next_id
        while group_id in self._never_again:
            group_id += 1
        return group_id

    def _num_free(self) -> int:
        if self._max_staleness == 0 and self._admitted:
            # Replacements of dropped groups start together, once all groups are done, and not one by one in the order
            # of the drops, so that synchronous runs repeat to the last bit.
            return 0
        in_store = len(self._admitted) + len(self._ready) + len(self._training)
        still_wanted = self._num_groups - self._num_trained - in_store
        return min(self._capacity - in_store, still_wanted)

    async def finish(self, summary: GroupSummary, ref: RefT) -> None:
        """Store a group that is generated and scored. Each admitted group finishes or is dropped exactly once."""
        async with self._changed:
            if summary.group_id not in self._admitted:
                raise AssertionError(f"group {summary.group_id} was reported as finished, but it is not in flight")
            self._leave(summary.group_id)
            if self._refuses(summary, self._place(summary.group_id)):
                self._count_dropped(summary.group_id, EQUAL_REWARDS)
            else:
                self._ready[summary.group_id] = StoredGroup(summary=summary, ref=ref)
            self._changed.notify_all()

    async def drop(self, group_id: int, reason: str) -> None:
        """Drop an admitted group that can't be generated; the next prompt takes its place."""
        async with self._changed:
            self._leave(group_id)
            self._count_dropped(group_id, reason)
            self._changed.notify_all()

    def reissue(self, group_id: int, reason: str) -> int:
        """Mark an admitted group as lost with its process. Return the policy version that generates it now, which may
        be newer than the one for which it was admitted."""
        if group_id not in self._admitted:
            raise AssertionError(f"group {group_id} can't be issued again after {reason}: it is not in flight")
        self.reissued_for[reason] += 1
        return self._version

    def _leave(self, group_id: int) -> None:
        self._admitted.remove(group_id)
        self._overtaken.pop(group_id, None)

    def _place(self, group_id: int) -> int:
        """Return the group's place among those admitted for the next step; below 0 for earlier steps."""
        return group_id - self._step_first_id - (self._capacity - self._groups_per_step)

    def _count_dropped(self, group_id: int, reason: str) -> None:
        self.dropped_for[reason] += 1
        del self._admitted_for[group_id]
        if self._max_staleness == 0:
            self._dropped_since_release.add(group_id)
        else:
            self._done_ahead.add(group_id)

    async def take(self, num_groups: int) -> list[StoredGroup[RefT]]:
        """Return the next `num_groups` groups, oldest first, when enough are ready.

        In the order of ids, not of arrival: a step's groups must not depend on which server was faster. Up to
        `straggler_window` groups may be taken before one that is still generated, unless that could grow too stale.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._next_in_order(num_groups) is not None)
            ids = self._next_in_order(num_groups)
            assert ids is not None
            for running in self._admitted:
                self._overtaken[running] += _num_above(running, ids)
            groups = [self._ready.pop(group_id) for group_id in ids]
            for group_id in ids:
                del self._admitted_for[group_id]
        self._training.update(ids)
        for group in groups:
            self._check_staleness(group.summary)
        return groups

    def _next_in_order(self, num_groups: int) -> list[int] | None:
        """Return the next step's groups; None while the step must wait."""
        if len(self._ready) < num_groups:
            return None
        ids = sorted(self._ready)[:num_groups]
        if self._overtakes_too_many(ids) or not self._leaves_time_for_the_rest(ids):
            return None
        return ids

    def _overtakes_too_many(self, ids: Sequence[int]) -> bool:
        return any(
            self._overtaken[running] + _num_above(running, ids) > self._straggler_window
            for running in self._admitted
            if running < ids[-1]
        )

    def _leaves_time_for_the_rest(self, ids: Sequence[int]) -> bool:
        # True if all groups but `ids` can still be trained before they are too stale
        taken = set(ids)
        rest = sorted(
            self._admitted_for[group_id] + self._max_staleness
            for group_id in (*self._admitted, *self._ready)
            if group_id not in taken
        )
        # The n-th of the remaining groups is trained 1 + n // groups_per_step steps after this step.
        return all(last >= self._version + 1 + place // self._groups_per_step for place, last in enumerate(rest))

    def _check_staleness(self, summary: GroupSummary) -> None:
        staleness = self._version - summary.min_policy_version
        if staleness > self._max_staleness:
            raise AssertionError(
                f"group {summary.group_id} is too old to be trained: its staleness is {staleness} steps (sampled by "
                f"policy version {summary.min_policy_version}, trained at {self._version}), but train.max_staleness is "
                f"{self._max_staleness}"
            )

    async def release(self, version: int) -> None:
        """Free the slots of the taken groups: they are trained, and every server holds `version`."""
        async with self._changed:
            self._num_trained += len(self._training)
            self._done_ahead |= self._training
            self._training.clear()
            self._dropped_since_release.clear()
            self._step_first_id = self.next_untrained_id
            self._done_ahead = {group_id for group_id in self._done_ahead if group_id > self._step_first_id}
            self._version = version
            self._changed.notify_all()

    @property
    def next_untrained_id(self) -> int:
        """First id that a resumed run hands out: groups in flight now are generated again. In a synchronous run this
        includes groups dropped since the last release: their replacements must start with the same groups as before."""
        in_flight = (*self._admitted, *self._ready, *self._training, *self._dropped_since_release)
        # The ids of kept groups may be above ids that have not been handed out again yet.
        return min((*in_flight, self._upcoming_id()))

    @property
    def done_ahead(self) -> tuple[int, ...]:
        """Ids above `next_untrained_id` that are trained or dropped: a resumed run does not hand them out again."""
        first = self.next_untrained_id
        return tuple(sorted(group_id for group_id in self._done_ahead if group_id > first))

    @property
    def waiting(self) -> list[StoredGroup[RefT]]:
        """Finished groups that no step has taken yet, oldest first."""
        return [self._ready[group_id] for group_id in sorted(self._ready)]

    @property
    def progress(self) -> str:
        """Return the finished groups and completions that wait to be trained, and the groups in generation."""
        completions = sum(group.summary.rewards.size for group in self._ready.values())
        return f"{len(self._ready)} groups with {completions} completions done, {len(self._admitted)} in generation"

    def oldest_ready_s(self) -> float:
        """Return the seconds that the oldest finished group has waited; 0 if none waits."""
        now = time.monotonic()
        return max((now - group.ready_at_s for group in self._ready.values()), default=0.0)

    def ledger(self) -> GroupCounts:
        return GroupCounts(
            admitted=len(self._admitted),
            ready=len(self._ready),
            training=len(self._training),
            trained=self._num_trained,
            dropped=self.dropped_for.total(),
            issued=self._num_issued,
        )


def _num_above(group_id: int, ids: Sequence[int]) -> int:
    return len(ids) - bisect_right(ids, group_id)


def _oldest_versions(waiting: Sequence[StoredGroup[RefT]]) -> dict[int, int]:
    # Groups are admitted in the order of ids, so the version for which a group was admitted is at most the version that
    # sampled any later one; its own may be newer, if it was issued again.
    versions: dict[int, int] = {}
    for group in sorted(waiting, key=lambda stored: stored.summary.group_id, reverse=True):
        oldest = min([group.summary.min_policy_version, *list(versions.values())[-1:]])
        versions[group.summary.group_id] = oldest
    return versions
