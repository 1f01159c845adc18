"""Everything that one rollout read and sampled, each token once, as a tree. Pure; used by `session.py`.

    add_turn(after=-1, [1, 2], sampled [3])    1 2 3
    add_turn(after=2, [4], sampled [5])        1 2 3 4 5              goes on
    add_turn(after=1, [], sampled [6])         1 2 3 4 5 | 6          tried again: 6 was read after 1 2

Tokens lie in the order of the turns, and `forks` says where one does not go on from the one before it, so the whole is
a `Trajectory` of the usual kind. What a turn reads is there once, also where an agent sends it again from the start; a
sampled turn is always new, also where it equals another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rayapp.core.forks import path_to
from rayapp.core.types import BoolArray, Completion, ExpertArray, FloatArray, Fork, Int32Array, TurnRecord, VersionSpan

_TOKEN = np.dtype([("id", np.int32), ("log_prob", np.float32), ("is_sampled", np.bool_), ("is_routed", np.bool_)])


class TokenTree:
    """See the module."""

    def __init__(self) -> None:
        self.size = 0
        self.forks: list[Fork] = []
        self.turns: list[TurnRecord] = []
        self._tokens = np.empty(1024, _TOKEN)
        self._experts: list[tuple[NDArray[np.int64], ExpertArray]] = []
        """Of the tokens at these indices. Each token is in one of them: the first turn that computed it."""
        self._starts = [0]
        self._children: dict[int, list[int]] = defaultdict(list)
        """By the index that they go on from: where forks start."""

    @property
    def token_ids(self) -> Int32Array:
        """(size,)"""
        return self._tokens["id"][: self.size].copy()

    @property
    def response_mask(self) -> BoolArray:
        """(size,) True exactly where a token was sampled."""
        return self._tokens["is_sampled"][: self.size].copy()

    @property
    def log_probs(self) -> FloatArray:
        """(size,) the engine's where a token was sampled, 0 elsewhere."""
        return self._tokens["log_prob"][: self.size].copy()

    @property
    def routed_experts(self) -> ExpertArray | None:
        """(size, layers, k) as in `Trajectory`."""
        if not self._experts:
            return None
        first = self._experts[0][1]
        experts = np.zeros((self.size, *first.shape[1:]), first.dtype)
        for indices, chosen in self._experts:
            experts[indices] = chosen
        return experts

    def num_routed(self, last: int) -> int:
        """Tokens up to the one at `last` whose experts are known: the first so many."""
        return int(self._tokens["is_routed"][path_to(last, self.forks)].sum())

    def context(self, last: int) -> list[int]:
        """The tokens up to the one at `last`, as an engine reads them; none for -1."""
        ids: list[int] = self._tokens["id"][path_to(last, self.forks)].tolist()
        return ids

    def sampled_ids(self, turn: int) -> list[int]:
        """The tokens of a turn, by its number."""
        ids: list[int] = self._tokens["id"][self.turns[turn].start : self.turns[turn].end].tolist()
        return ids

    def num_new(self, after: int, ids: Sequence[int]) -> int:
        """How many of the tokens, read after the one at `after`, are not there yet."""
        return len(ids) - self._known(after, np.asarray(ids, np.int32))[1]

    def add_turn(
        self, after: int, read_ids: Sequence[int], completion: Completion, *, text: str, started_at_s: float
    ) -> tuple[int, int]:
        """What was read after the token at `after` (-1: a conversation of its own), and what was sampled then.

        Returns:
            Indices of the last token that was read and of the last that was sampled.
        """
        ids = np.asarray(read_ids, np.int32)
        after, num_known = self._known(after, ids)
        prompt_end = self._append(after, ids[num_known:], sampled=False)
        last = self._append(prompt_end, completion.token_ids, completion.log_probs, sampled=True)
        self._note_experts(path_to(last, self.forks), completion)
        self.turns.append(TurnRecord.of(completion, end=self.size, text=text, started_at_s=started_at_s))
        return prompt_end, last

    def _note_experts(self, path: NDArray[np.int64], completion: Completion) -> None:
        if completion.routed_experts is None:
            return
        # All up to the last token but one; turns that were sampled meanwhile may know some of these, too.
        indices = path[path.size - 1 - len(completion.routed_experts) : -1]
        is_new = ~self._tokens["is_routed"][indices]
        self._experts.append((indices[is_new], completion.routed_experts[is_new]))
        self._tokens["is_routed"][indices] = True

    def _known(self, after: int, ids: Int32Array) -> tuple[int, int]:
        """How far the tokens are there already: index of the last that is, and their number."""
        num_known = 0
        while num_known < ids.size:
            found = [(self._num_equal(start, ids[num_known:]), start) for start in self._next(after)]
            number, start = max(found, default=(0, 0))
            if number == 0:
                break
            after, num_known = start + number - 1, num_known + number
        return after, num_known

    def _next(self, after: int) -> list[int]:
        """Where what goes on from the token at `after` starts."""
        is_inside = after + 1 < self.size and self._starts[bisect_right(self._starts, after + 1) - 1] != after + 1
        is_first = after == -1 and self.size > 0
        return [*([after + 1] if is_inside or is_first else []), *self._children.get(after, ())]

    def _num_equal(self, start: int, ids: Int32Array) -> int:
        run = bisect_right(self._starts, start)
        end = self._starts[run] if run < len(self._starts) else self.size
        size = min(end - start, ids.size)
        differ = np.flatnonzero(self._tokens["id"][start : start + size] != ids[:size])
        return int(differ[0]) if differ.size else size

    def _append(self, after: int, ids: Int32Array, log_probs: FloatArray | float = 0.0, *, sampled: bool) -> int:
        if not ids.size:
            return after
        start, self.size = self.size, self.size + int(ids.size)
        if after != start - 1:
            self.forks.append(Fork(start=start, after=after))
            self._starts.append(start)
            self._children[after].append(start)
        if self.size > self._tokens.size:
            larger = np.empty(max(self.size, 2 * self._tokens.size), _TOKEN)
            larger[:start] = self._tokens[:start]
            self._tokens = larger
        added = self._tokens[start : self.size]
        added["id"], added["log_prob"], added["is_sampled"], added["is_routed"] = ids, log_probs, sampled, False
        return self.size - 1


def cut_completion(completion: Completion, num_tokens: int) -> Completion:
    """The completion as it had been sampled with `max_tokens` of that number; its text is the caller's to cut."""
    if completion.token_ids.size <= num_tokens:
        return completion
    spans, left = list[VersionSpan](), num_tokens
    for span in completion.version_spans:
        if left > 0:
            spans.append(replace(span, num_tokens=min(span.num_tokens, left)))
        left -= span.num_tokens
    experts, num_cut = completion.routed_experts, completion.token_ids.size - num_tokens
    return replace(
        completion,
        routed_experts=None if experts is None else experts[: len(experts) - num_cut],
        token_ids=completion.token_ids[:num_tokens],
        log_probs=completion.log_probs[:num_tokens],
        finish_reason="length",
        version_spans=tuple(spans),
    )
