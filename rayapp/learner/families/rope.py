"""Positions whose frequencies depend on the longest sequence computed together (longrope), pinned to one choice.

Packed beside a longer sequence a short one would be computed otherwise than alone, and otherwise than by vLLM, which
decides once, by `max_model_len`. So every forward is told of one more token, at the last position that there may be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

PINNED = "longrope"


def pin_positions(causal_lm: nn.Module, num_tokens: int) -> None:
    """Make positions of `PINNED` those of a sequence of `num_tokens`, whatever is computed. Call it once."""
    for module in causal_lm.modules():
        kinds = getattr(module, "rope_type", None)
        if PINNED in (kinds.values() if isinstance(kinds, dict) else (kinds,)):
            module.forward = partial(_with_last, module.forward, num_tokens - 1)


def _with_last(
    forward: Callable[..., Any], last: int, hidden: Tensor, position_ids: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, ...]:
    told = torch.cat([position_ids, position_ids.new_full((*position_ids.shape[:-1], 1), last)], dim=-1)
    return tuple(turns[:, :-1] for turns in forward(hidden, told, *args, **options))
