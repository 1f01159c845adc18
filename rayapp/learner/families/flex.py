"""Computes attention that the standard kernels lack.

On GPU torch's flex attention computes sinks and soft caps; a rule on three numbers of each packed token says to which
tokens it attends, so no N x N mask is stored. On CPU masked blocks, in plain float32, compute windows and caps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayapp.learner.device import moved
from rayapp.learner.packing import Packing, Segment

MAX_ROWS = 256  # of a block under a window: with more, most columns would be visible to few rows


class MaskRule(NamedTuple):
    scale: float
    window: int | None = None  # tokens that a query sees, itself included
    softcap: float | None = None  # scores become cap * tanh(score / cap)


class Block(NamedTuple):
    """Queries `rows`, and keys `columns` of one segment."""

    rows: slice
    columns: slice
    is_own: bool = False  # rows and columns are the same tokens: each row sees the columns up to itself
    is_masked: bool = False  # rows see only some columns, or scores are capped: not for the flash kernel


def blocks_of(segments: Sequence[Segment], positions: Tensor, rule: MaskRule) -> Iterator[Block]:
    """Yield all blocks; the first of each row has its own segment as columns. `positions` (N,) are within the
    sequences."""
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
    for start in range(first, last, MAX_ROWS):
        stop = min(start + MAX_ROWS, last)
        rows = places[start:stop]
        # Positions are consecutive inside a segment, so position + shift is the column.
        shift = s.start - places[s.start]
        columns = slice(max(s.start, min(rows) - window + 1 + shift), min(s.end, max(rows) + 1 + shift))
        if columns.start < columns.stop:
            yield Block(slice(start, stop), columns, is_masked=True)


def mask_of(block: Block, positions: Tensor, rule: MaskRule) -> Tensor:
    """Return a block's mask (R, C), True where a row sees a column."""
    behind = positions[block.rows, None] - positions[None, block.columns]
    return (behind >= 0) if rule.window is None else (behind >= 0) & (behind < rule.window)


def masked_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rule: MaskRule) -> tuple[Tensor, Tensor]:
    """Return output (Hkv, G, R, D) and log-sum-exp (Hkv, G, R): 0 and -inf for rows that see no column."""
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
    rule: MaskRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query (Hkv, G, R, D), key and value (Hkv, G, C, D), from final output and log-sum-exp."""
    scores = _scores(query, key, mask, rule)
    weights = (scores - lse.unsqueeze(-1)).exp_()
    delta = torch.linalg.vecdot(grad_out, out).unsqueeze(-1)
    slopes = (grad_out @ value.transpose(-1, -2)).sub_(delta).mul_(weights).mul_(rule.scale)
    if rule.softcap is not None:
        # d/dx tanh(x) = 1 - tanh(x)^2. Masked entries have weight 0 and a score of -inf.
        slopes.mul_(1 - (scores.masked_fill_(weights == 0, 0.0) / rule.softcap).square_())
    return slopes @ key, slopes.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ grad_out


def _scores(query: Tensor, key: Tensor, mask: Tensor, rule: MaskRule) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).mul_(rule.scale)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return scores.masked_fill_(~mask, -torch.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMask:
    """Radix tree of N packed tokens, on the device."""

    ends: Tensor  # of the subtree of each token's segment, (N,)
    positions: Tensor  # within its own sequence, (N,)
    masks: dict[int | None, Any] = field(default_factory=dict)  # by window, shared by layers

    def block_mask(self, window: int | None) -> Any:
        if window not in self.masks:
            self.masks[window] = self._make(window)
        return self.masks[window]

    def _make(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        ends, positions, num_tokens = self.ends, self.positions, self.ends.numel()

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Segments are laid out depth first: a query sees an earlier key if the query is in the subtree of the key's
            # segment.
            seen = (key <= query) & (query < ends[key])
            return seen if window is None else seen & (positions[query] - positions[key] < window)

        # Compile this on a GPU: uncompiled, N x N booleans would exist at once.
        return create_block_mask(
            sees, None, None, num_tokens, num_tokens, device=str(ends.device), _compile=ends.device.type == "cuda"
        )


def tree_mask(packing: Packing, device: torch.device) -> TreeMask:
    ends = np.empty(packing.num_tokens, np.int64)
    for segment in packing.segments:
        ends[segment.start : segment.end] = segment.subtree_end
    return TreeMask(ends=moved(ends, device), positions=moved(packing.position_ids, device))


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, tree: TreeMask, rule: MaskRule
) -> Tensor:
    """Return (1, N, Hq, D) for query (1, Hq, N, D), key and value (1, Hkv, N, D)."""
    from torch.nn.attention.flex_attention import AuxRequest

    # Make the cap a tensor: the compiler treats a number in a closure as dynamic, and then fails in the backward.
    cap = None if rule.softcap is None else torch.full((), rule.softcap, dtype=torch.float32, device=query.device)

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    output, aux = _flex(query.device.type)(
        query,
        key,
        value,
        score_mod=capped if cap is not None else None,
        block_mask=tree.block_mask(rule.window),
        scale=rule.scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        # A sink takes part in every softmax, but adds no value.
        share = torch.sigmoid(aux.lse - sinks.float().view(1, -1, 1))
        output = output * share.unsqueeze(-1).to(output.dtype)
    result: Tensor = output.transpose(1, 2)
    return result


@cache
def _flex(device_type: str) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
