"""Attention on GPU for layers with sinks or a soft cap, which the varlen kernel lacks: torch's flex attention.

Who sees whom is a rule on three numbers of each packed token, so no mask of N x N is kept. tests/gpu compares it with
the CPU's; the other tests run the forward uncompiled on CPU, where flex attention has no backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayapp.learner.families.masked_blocks import Rule
from rayapp.learner.packing import Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMask:
    """The radix tree of N packed tokens, on the device."""

    ends: Tensor
    """(N,) where the subtree of each token's segment ends."""
    positions: Tensor
    """(N,) within the own sequence."""
    masks: dict[int | None, Any] = field(default_factory=dict)
    """Flex attention's masks by window: a model has one or two kinds of layers, and many layers."""

    def block_mask(self, window: int | None) -> Any:
        """Flex attention's mask of this tree."""
        if window not in self.masks:
            self.masks[window] = self._make(window)
        return self.masks[window]

    def _make(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        ends, positions, num_tokens = self.ends, self.positions, self.ends.numel()

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Depth first: what follows a token and is inside its segment's subtree continues it.
            seen = (key <= query) & (query < ends[key])
            return seen if window is None else seen & (positions[query] - positions[key] < window)

        # Compiled on a GPU: otherwise N x N booleans exist at once.
        return create_block_mask(
            sees, None, None, num_tokens, num_tokens, device=str(ends.device), _compile=ends.device.type == "cuda"
        )


def tree_mask(packing: Packing, device: torch.device) -> TreeMask:
    """The tree of these tokens on this device."""
    ends = np.empty(packing.num_tokens, np.int64)
    for segment in packing.segments:
        ends[segment.start : segment.end] = segment.subtree_end
    return TreeMask(ends=torch.from_numpy(ends).to(device), positions=torch.from_numpy(packing.position_ids).to(device))


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, tree: TreeMask, rule: Rule
) -> Tensor:
    """(1, N, Hq, D) from query (1, Hq, N, D), key and value (1, Hkv, N, D)."""
    from torch.nn.attention.flex_attention import AuxRequest

    # A tensor: the compiler takes a number of a closure for one that changes, and fails where the gradient needs it.
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
        # A sink takes its share of every softmax and gives nothing.
        share = torch.sigmoid(aux.lse - sinks.float().view(1, -1, 1))
        output = output * share.unsqueeze(-1).to(output.dtype)
    result: Tensor = output.transpose(1, 2)
    return result


@cache
def _flex(device_type: str) -> Any:
    """Flex attention, compiled where it is to be fast."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
