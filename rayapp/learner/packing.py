"""Packs trajectories so that a token shared by several trajectories is computed once. Pure numpy.

The trajectories of a group form a radix tree: a branch begins wherever two of them diverge. The tree's segments are
laid out depth first, next to the segments of other groups:

    prompt -+- a b -+- c d          packed   prompt | a b | c d | e | f g
     |       '- e            subtree of `a b`: [a b, e]; of the prompt: everything
     '- f g

Linear layers and norms see one row of N unique tokens. In attention a segment sees itself causally and all of its
ancestors. A trajectory that shares nothing is a tree of one segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rayapp.core.types import Int32Array

Int64Array = NDArray[np.int64]

MIN_SAVED_TOKENS = 4  # that a branch must save: its attention calls cost as much as a few tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    start: int
    end: int  # after the last token
    subtree_end: int  # [end, subtree_end) continue this segment and see all of it
    parent: int  # the segment that this one continues; -1 for a root


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Several sequences packed into N unique tokens.

    Example: sequences [7, 8, 1, 2] and [7, 8, 1, 3] -> token_ids [7, 8, 1, 2, 3], position_ids [0, 1, 2, 3, 3], paths
    [0, 1, 2, 3] and [0, 1, 2, 4] (without MIN_SAVED_TOKENS).
    """

    token_ids: Int64Array  # unique tokens in packed order, (N,)
    position_ids: Int64Array  # within each token's own sequence, (N,)
    segments: tuple[Segment, ...]  # depth first; they cover [0, N)
    paths: tuple[Int64Array, ...]  # packed positions of each sequence's tokens

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.size)

    @property
    def num_attended(self) -> int:
        """Pairs of a unique token and a token that it attends to, itself included."""
        return int(self.position_ids.sum()) + self.num_tokens


def pack(trees: Sequence[Sequence[Int32Array]], *, share_prefixes: bool) -> Packing:
    """Pack groups (`trees`) of sequences that may share prefixes. `paths` are in the order of the flattened trees."""
    sequences = [sequence for tree in trees for sequence in tree]
    numbers = range(len(sequences))
    builder, rest = _PackingBuilder(sequences), iter(numbers)
    for members in [[next(rest) for _ in tree] for tree in trees] if share_prefixes else [[i] for i in numbers]:
        builder.add_tree(members)
    return builder.finish()


@dataclass(frozen=True, slots=True)
class _Branch:
    """Sorted sequences that continue one path."""

    order: list[int]
    shared: list[int]  # length of the prefix that `order[i]` and `order[i + 1]` share
    depth: int  # tokens that are on the path
    path: Int64Array  # their packed positions
    parent: int  # segment that ends the path; -1 for none


class _PackingBuilder:
    def __init__(self, sequences: Sequence[Int32Array]) -> None:
        self._sequences = sequences
        self._tokens: list[Int32Array] = []
        self._positions: list[Int64Array] = []
        self._segments: list[Segment] = []
        self._paths: dict[int, Int64Array] = {}
        self._size = 0

    def add_tree(self, members: list[int]) -> None:
        # Sort, so that sequences with a common prefix are neighbours. The prefix common to a range of sequences is the
        # shortest prefix that two neighbours in the range share.
        order = sorted(members, key=lambda i: sort_key(self._sequences[i]))
        shared = [common_prefix(self._sequences[a], self._sequences[b]) for a, b in itertools.pairwise(order)]
        # A stack, not recursion: the tree of a trajectory with hundreds of forks is as deep as it has forks.
        waiting: list[_Branch | int] = [_Branch(order, shared, depth=0, path=np.empty(0, np.int64), parent=-1)]
        while waiting:
            match waiting.pop():
                case int(segment):
                    self._segments[segment] = replace(self._segments[segment], subtree_end=self._size)
                case branch:
                    waiting += reversed(self._place_branch(branch))

    def finish(self) -> Packing:
        return Packing(
            token_ids=_joined(self._tokens),
            position_ids=_joined(self._positions),
            segments=tuple(self._segments),
            paths=tuple(self._paths[i] for i in range(len(self._sequences))),
        )

    def _place_branch(self, branch: _Branch) -> list[_Branch | int]:
        # Places the tokens that all sequences share. Returns the branches that continue them, then the new segment's
        # index, whose subtree ends where the last of the branches ends.
        order, shared, depth = branch.order, branch.shared, branch.depth
        first = self._sequences[order[0]]
        common = min(shared) if shared else first.size
        if len(order) > 1 and (common - depth) * (len(order) - 1) < MIN_SAVED_TOKENS:
            common = depth
        if common == depth:
            return [*self._continued(branch)]
        index, start = len(self._segments), self._place(first[depth:common], depth)
        self._segments.append(Segment(start=start, end=self._size, subtree_end=self._size, parent=branch.parent))
        path = np.concatenate([branch.path, np.arange(start, self._size)])
        return [*self._continued(replace(branch, depth=common, path=path, parent=index)), index]

    def _continued(self, branch: _Branch) -> Iterator[_Branch]:
        order, shared = branch.order, branch.shared
        smallest, first = min(shared, default=0), 0
        for i in range(len(order)):
            if i < len(shared) and shared[i] > smallest:
                continue
            members, inner = order[first : i + 1], shared[first:i]
            first = i + 1
            if len(members) == 1 and self._sequences[members[0]].size == branch.depth:
                self._paths[members[0]] = branch.path
            else:
                yield replace(branch, order=members, shared=inner)

    def _place(self, tokens: Int32Array, depth: int) -> int:
        start = self._size
        self._tokens.append(tokens)
        self._positions.append(np.arange(depth, depth + tokens.size))
        self._size += int(tokens.size)
        return start


def common_prefix(first: Int32Array, second: Int32Array) -> int:
    size = min(first.size, second.size)
    differ = np.flatnonzero(first[:size] != second[:size])
    return int(differ[0]) if differ.size else int(size)


def sort_key(tokens: Int32Array) -> bytes:
    # Big-endian bytes of non-negative ids sort like the ids.
    return tokens.astype(">u4").tobytes()


def segment_paths(segments: Sequence[Segment]) -> list[Int64Array]:
    """Return the packed positions of each segment's ancestors, then its own."""
    paths: list[Int64Array] = []
    for segment in segments:
        own = np.arange(segment.start, segment.end)
        paths.append(own if segment.parent < 0 else np.concatenate([paths[segment.parent], own]))
    return paths


def _joined(parts: Sequence[NDArray[np.int32] | Int64Array]) -> Int64Array:
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)
