"""Micro-batches: the tokens that one forward computes, and the places of each trajectory's log-probs among them.

A micro-batch never splits a trajectory; a group may be spread over several, each of which computes the prompt again. A
trajectory with forks is one row of the loss, whose branches share prefixes as a group's trajectories do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rayapp.core.errors import LearnerError
from rayapp.core.trajectories import branches, join_allowed
from rayapp.core.types import AllowedTokens, FloatArray, Int32Array, Trajectory
from rayapp.learner.packing import Int64Array, Packing, common_prefix, pack, sort_key

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainItem:
    """Trajectory to compute, with its advantages."""

    row: int  # among all trajectories of the step
    group: int  # position in the step
    trajectory: Trajectory
    advantages: FloatArray  # of each response token, (R,)

    @property
    def rollout_log_probs(self) -> FloatArray:
        """The engine's log-probs (R,) of the response tokens."""
        chosen: FloatArray = self.trajectory.rollout_log_probs[self.trajectory.response_mask]
        return chosen

    @property
    def num_inputs(self) -> int:
        """Tokens that the model reads without shared prefixes: the last response token is only a target."""
        return sum(branch.size for branch in inputs_of(self))

    @property
    def num_attended(self) -> int:
        """Pairs of a token and a token that it attends to, without shared prefixes."""
        return sum(branch.size * (branch.size + 1) // 2 for branch in inputs_of(self))


Inputs = Mapping[str, "Tensor"]
"""The processor's tensors for one picture, by the names of `get_image_features`: pixel_values, image_grid_thw, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPictures:
    """Pictures of a micro-batch with N packed tokens."""

    inputs: Mapping[str, Inputs]  # of each picture by its SHA-256, in the order of their features
    rows: Int64Array  # (N,) row of each token among the features of all pictures, one after another; -1 for text
    # (3, N) rotary positions in time, height and width; None if the model counts a picture's tokens as text.
    positions: Int64Array | None

    def part(self, tokens: slice, num_tokens: int) -> PackedPictures:
        """Return the tokens of one rank, after padding with text to `num_tokens`."""
        missing = (0, num_tokens - self.rows.size)
        positions = None if self.positions is None else np.pad(self.positions, ((0, 0), missing))[:, tokens]
        rows = np.pad(self.rows, missing, constant_values=-1)[tokens]
        return replace(self, rows=rows, positions=positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Packed tokens of one forward over B trajectories, and the positions of their log-probs in the pack."""

    items: tuple[TrainItem, ...]
    packing: Packing
    # Positions (M,), ascending, that predict a response token: one for each set of tokens that a form allowed there.
    head_positions: Int64Array
    # Index in head_positions of each unique pair of a position and its next token, ascending, (P,).
    pair_rows: Int64Array
    pair_targets: Int64Array  # next token of each pair, (P,)
    row_pairs: Int64Array  # pair of each response token, (B, T); 0 past a row's own
    row_heads: Int64Array  # index in head_positions of each response token, (B, T); 0 past a row's own
    mask: FloatArray  # 1 on a row's own response tokens, (B, T)
    allowed: AllowedTokens | None = None  # by forms, at each of the M positions; None: all
    # Experts that the engine chose for each packed token, (N, layers, k); -1 without a record.
    routed_experts: NDArray[np.int16] | None = None
    pictures: PackedPictures | None = None

    @property
    def num_trained_tokens(self) -> int:
        return int(self.mask.sum())


def split(items: Sequence[TrainItem], *, max_tokens: int, share_prefixes: bool) -> list[MicroBatch]:
    """Return micro-batches of at most `max_tokens` computed tokens, about equally full. LearnerError: a trajectory
    alone exceeds it, or has a response token without a prompt."""
    ordered = sorted(items, key=lambda item: (item.group, sort_key(inputs_of(item)[0])))
    costs = _costs(ordered, max_tokens, share_prefixes=share_prefixes)
    total = sum(marginal for marginal, _ in costs)
    # Fill all micro-batches about equally: a small last micro-batch would have small matrix products, which are slow.
    num_bins = max(1, -(-total // max_tokens))
    target = total / num_bins
    bins: list[list[TrainItem]] = []
    filled = 0
    for item, (marginal, alone) in zip(ordered, costs, strict=True):
        # Rather exceed the equal share than add a micro-batch, but never exceed `max_tokens`.
        is_full = filled >= target and len(bins) < num_bins
        if not bins or filled + marginal > max_tokens or is_full:
            bins.append([item])
            filled = alone
        else:
            bins[-1].append(item)
            filled += marginal
    return [make_micro_batch(chosen, share_prefixes=share_prefixes) for chosen in bins]


def make_micro_batch(items: Sequence[TrainItem], *, share_prefixes: bool) -> MicroBatch:
    groups: dict[int, list[TrainItem]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    ordered = [item for members in groups.values() for item in members]
    trees = [[branch for item in members for branch in inputs_of(item)] for members in groups.values()]
    experts = _experts_of(ordered)
    if experts is None:
        return _index(ordered, pack(trees, share_prefixes=share_prefixes))
    packing, routed = _pack_routed(trees, experts, share_prefixes=share_prefixes)
    return replace(_index(ordered, packing), routed_experts=routed)


def _experts_of(items: Sequence[TrainItem]) -> NDArray[np.int16] | None:
    """Return recorded experts (number of inputs, layers, k)."""
    known = [item.trajectory.routed_experts for item in items if item.trajectory.routed_experts is not None]
    if not known:
        return None
    parts = []
    for item in items:
        chosen = item.trajectory.routed_experts
        for path, responses in trained_branches(item.trajectory):
            read = path[: responses[-1]]
            nothing = np.full((read.size, *known[0].shape[1:]), -1, np.int16)
            parts.append(nothing if chosen is None else chosen[read].astype(np.int16))
    experts: NDArray[np.int16] = np.concatenate(parts)
    return experts


def _pack_routed(
    trees: Sequence[Sequence[NDArray[np.int32]]], experts: NDArray[np.int16], *, share_prefixes: bool
) -> tuple[Packing, NDArray[np.int16]]:
    # A token is shared only with equal experts.
    branches = [branch for tree in trees for branch in tree]
    tokens = np.concatenate(branches)
    columns = tokens.astype(">i4")[:, None].view(np.uint8), experts.reshape(tokens.size, -1).view(np.uint8)
    rows = np.ascontiguousarray(np.concatenate(columns, axis=1))
    _, first, pair_of = np.unique(rows.view(f"V{rows.shape[1]}")[:, 0], return_index=True, return_inverse=True)
    pairs = iter(np.split(pair_of.astype(np.int32), np.cumsum([branch.size for branch in branches])[:-1]))
    packing = pack([[next(pairs) for _ in tree] for tree in trees], share_prefixes=share_prefixes)
    where = first[packing.token_ids]
    return replace(packing, token_ids=tokens[where].astype(np.int64)), experts[where]


def empty_micro_batch(num_tokens: int = 1, *, num_heads: int = 1) -> MicroBatch:
    heads, none = np.zeros(num_heads, np.int64), np.zeros((0, 1), np.int64)
    return MicroBatch(
        items=(),
        packing=pack([[np.zeros(num_tokens, np.int32)]], share_prefixes=False),
        head_positions=heads,
        pair_rows=heads,
        pair_targets=heads,
        row_pairs=none,
        row_heads=none,
        mask=none.astype(np.float32),
    )


def inputs_of(item: TrainItem) -> list[NDArray[np.int32]]:
    """Return the tokens that the model reads, for each branch: all before the branch's last trained token."""
    tokens = item.trajectory.token_ids
    return [tokens[path[: responses[-1]]] for path, responses in trained_branches(item.trajectory)]


def trained_branches(trajectory: Trajectory) -> list[tuple[Int64Array, Int64Array]]:
    """Return, for each branch, its tokens' indices and the positions in it to train. A token that branches share is
    trained in the first of them; branches without one are left out."""
    left, found = trajectory.response_mask.copy(), list[tuple[Int64Array, Int64Array]]()
    for path in branches(trajectory.num_tokens, trajectory.forks):
        responses = np.flatnonzero(left[path])
        left[path] = False
        if responses.size:
            found.append((path, responses))
    return found


def _num_unique(item: TrainItem) -> int:
    if not item.trajectory.forks:
        return item.num_inputs
    return int(np.unique(np.concatenate([path[: last[-1]] for path, last in trained_branches(item.trajectory)])).size)


def _costs(ordered: Sequence[TrainItem], max_tokens: int, *, share_prefixes: bool) -> list[tuple[int, int]]:
    """Return, for each item, the tokens that it adds to its predecessor's micro-batch, and those it needs alone."""
    costs: list[tuple[int, int]] = []
    previous, experts = None, None
    for item in ordered:
        alone = _num_unique(item) if share_prefixes else item.num_inputs
        _check_length(item, alone, max_tokens)
        own, shared = _experts_of([item]) if share_prefixes else None, 0
        if share_prefixes and previous is not None and previous.group == item.group:
            shared = _num_shared(inputs_of(previous)[0], inputs_of(item)[0], experts, own)
        costs.append((alone - shared, alone))
        previous, experts = item, own
    return costs


def _num_shared(
    first: Int32Array, second: Int32Array, own: NDArray[np.int16] | None, theirs: NDArray[np.int16] | None
) -> int:
    """Return the number of leading tokens that both rows share, with equal experts."""
    common = common_prefix(first, second)
    if own is None or theirs is None:
        return common if own is theirs else 0
    differ = np.flatnonzero((own[:common] != theirs[:common]).any((1, 2)))
    return int(differ[0]) if differ.size else common


def _check_length(item: TrainItem, num_tokens: int, max_tokens: int) -> None:
    if any(responses[0] == 0 for _, responses in trained_branches(item.trajectory)):
        raise LearnerError(
            "a trajectory starts with a response token: it has no prompt from which to predict this token"
        )
    if num_tokens > max_tokens:
        raise LearnerError(
            f"a trajectory of the step's group {item.group} has {num_tokens} tokens, but "
            f"learner.max_tokens_per_microbatch x learner.sequence_parallel is {max_tokens}, and a micro-batch must "
            "hold a whole trajectory. Raise learner.max_tokens_per_microbatch."
        )


def _index(items: Sequence[TrainItem], packing: Packing) -> MicroBatch:
    positions, targets = [], []
    packed = iter(packing.paths)
    for item in items:
        position_of = np.zeros(item.trajectory.num_tokens, np.int64)
        for path, responses in trained_branches(item.trajectory):
            position_of[path[responses]] = next(packed)[responses - 1]
        mask = item.trajectory.response_mask
        positions.append(position_of[mask])
        targets.append(item.trajectory.token_ids[mask].astype(np.int64))
    lengths = np.array([position.size for position in positions])
    allowed = _allowed_of(items)
    mask_of = np.full(lengths.sum(), -1) if allowed is None else allowed.mask_of
    # One integer for each pair: unique rows of several numbers take eight times as long, while the GPU waits.
    width = mask_of.max(initial=-1) + 2
    heads, head_of = np.unique(np.concatenate(positions) * width + mask_of + 1, return_inverse=True)
    pairs, pair_of = np.unique(head_of << 32 | np.concatenate(targets), return_inverse=True)
    mask = np.arange(lengths.max()) < lengths[:, None]
    row_pairs, row_heads = np.zeros(mask.shape, np.int64), np.zeros(mask.shape, np.int64)
    row_pairs[mask], row_heads[mask] = pair_of, head_of
    return MicroBatch(
        items=tuple(items),
        packing=packing,
        head_positions=heads // width,
        pair_rows=pairs >> 32,
        pair_targets=pairs & 0xFFFFFFFF,
        row_pairs=row_pairs,
        row_heads=row_heads,
        mask=mask.astype(np.float32),
        allowed=None if allowed is None else replace(allowed, mask_of=(heads % width - 1).astype(np.int32)),
    )


def _allowed_of(items: Sequence[TrainItem]) -> AllowedTokens | None:
    parts = list[tuple[AllowedTokens | None, int]]()
    for item in items:
        allowed, mask = item.trajectory.allowed, item.trajectory.response_mask
        parts.append((None if allowed is None else allowed.of(mask), item.trajectory.num_response_tokens))
    return join_allowed(parts)


def advantages_of(batch: MicroBatch) -> Tensor:
    return stack_rows([item.advantages for item in batch.items], batch.mask.shape[1])


def rollout_log_probs_of(batch: MicroBatch) -> Tensor:
    return stack_rows([item.rollout_log_probs for item in batch.items], batch.mask.shape[1])


def stack_rows(rows: Sequence[FloatArray], width: int) -> Tensor:
    """Stack rows, padded with 0 to (B, width)."""
    import torch

    stacked = np.zeros((len(rows), width), np.float32)
    for target, row in zip(stacked, rows, strict=True):
        target[: row.size] = row
    return torch.from_numpy(stacked)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScores:
    log_probs: FloatArray
    entropy: FloatArray
    sum_pi_squared: FloatArray


def scores_by_row(batch: MicroBatch, scores: Iterable[Tensor]) -> dict[int, RowScores]:
    """Copy the scores (B, T) of a micro-batch to the host, by row."""
    log_probs, entropy, squares, _ = (tensor.cpu().numpy() for tensor in scores)
    return {
        item.row: RowScores(
            log_probs=log_probs[i, : item.advantages.size],
            entropy=entropy[i, : item.advantages.size],
            sum_pi_squared=squares[i, : item.advantages.size],
        )
        for i, item in enumerate(batch.items)
    }
