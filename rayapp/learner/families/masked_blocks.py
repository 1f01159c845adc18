"""Blocks of attention on CPU that torch's flash kernel lacks: a sliding window, and a soft cap on the scores.

Called by `rayapp.learner.attention` for each block of rows (queries) and columns (keys) of the packed tokens. Plain
matrix products in float32; a block is small, as a window is cut out of long segments row by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rayapp.learner.packing import Segment

MAX_ROWS = 256
"""Rows of a block under a window: more would compute columns that few of them see."""


class Rule(NamedTuple):
    """How a layer's attention scores its keys."""

    scale: float
    window: int | None = None
    """Tokens that a query sees, itself included; None: its whole path."""
    softcap: float | None = None
    """Scores become cap * tanh(score / cap); None: they stay."""


class Block(NamedTuple):
    """Queries `rows` against keys `columns`, which are of one segment."""

    rows: slice
    columns: slice
    is_own: bool = False
    """Rows and columns are the same run of tokens: each row sees those up to itself."""
    is_masked: bool = False
    """Not for the flash kernel: a row sees some of the columns, or scores are capped."""


def blocks_of(segments: Sequence[Segment], positions: Tensor, rule: Rule) -> Iterator[Block]:
    """All blocks; for every row the first one that names it holds the row itself.

    Args:
        positions: (N,) within the own sequence.
    """
    always = rule.softcap is not None
    window = rule.window or (positions.numel() if always else None)
    places = positions.tolist() if window is not None else []
    for s in segments:
        if window is None or (not always and s.end - s.start <= window):
            yield Block(slice(s.start, s.end), slice(s.start, s.end), is_own=True)
        else:
            yield from _masked(s, s.start, s.end, places, window)
    for s in segments:
        if s.subtree_end == s.end:
            continue
        if window is None or (not always and max(places[s.end : s.subtree_end]) - places[s.start] < window):
            yield Block(slice(s.end, s.subtree_end), slice(s.start, s.end))
        else:
            yield from _masked(s, s.end, s.subtree_end, places, window)


def _masked(s: Segment, first: int, last: int, places: Sequence[int], window: int) -> Iterator[Block]:
    """Rows [first, last) against the part of a segment that any of them sees."""
    for start in range(first, last, MAX_ROWS):
        stop = min(start + MAX_ROWS, last)
        rows = places[start:stop]
        # Inside a segment positions count up, so positions become columns by a shift.
        shift = s.start - places[s.start]
        columns = slice(max(s.start, min(rows) - window + 1 + shift), min(s.end, max(rows) + 1 + shift))
        if columns.start < columns.stop:
            yield Block(slice(start, stop), columns, is_masked=True)


def mask_of(block: Block, positions: Tensor, rule: Rule) -> Tensor:
    """(R, C) True where a row sees a column."""
    behind = positions[block.rows, None] - positions[None, block.columns]
    return (behind >= 0) if rule.window is None else (behind >= 0) & (behind < rule.window)


def masked_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Output (Hkv, G, R, D) and log-sum-exp (Hkv, G, R) of a block; 0 and -inf where a row sees nothing."""
    scores = _scores(query, key, mask, rule)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.clamp_min(torch.finfo(lse.dtype).min).unsqueeze(-1)).exp_()
    return weights @ value, lse


def masked_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor,
    rule: Rule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block's query, key and value, (Hkv, G, R or C, D), from the rows' final output and log-sum-exp."""
    scores = _scores(query, key, mask, rule)
    weights = (scores - lse.unsqueeze(-1)).exp_()
    delta = torch.linalg.vecdot(grad_out, out).unsqueeze(-1)
    slopes = (grad_out @ value.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(rule.scale)
    if rule.softcap is not None:
        # d tanh(x) = 1 - tanh(x)^2; what is not seen has weight 0 and a score of -inf.
        slopes.mul_(1 - (scores.masked_fill_(weights == 0, 0.0) / rule.softcap).square_())
    return slopes @ key, slopes.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad_out


def _scores(query: Tensor, key: Tensor, mask: Tensor, rule: Rule) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).mul_(rule.scale)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return scores.masked_fill_(~mask, -torch.inf)
