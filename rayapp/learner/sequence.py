"""Sequence parallelism (Ulysses): several ranks compute one micro-batch, each a range of its tokens.

    (n, all heads) --exchange--> (N, own heads) --attention--> (N, own heads) --exchange--> (n, all heads)

Log-probs are gathered at the end, so that all ranks of a group have the same loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from rayapp.config.learner import LearnerSection
from rayapp.core.errors import InputError
from rayapp.learner.attention import AttentionLayout, packed_attention
from rayapp.learner.batch import MicroBatch
from rayapp.learner.families.mixers import mixers_of
from rayapp.learner.packing import Packing, Segment

SEQUENCE_ATTENTION = "rayapp_packed_over_ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    group: dist.ProcessGroup
    rank: int
    size: int

    def own(self, num_tokens: int) -> slice:
        """Return this rank's positions among `num_tokens`, a multiple of `size`."""
        each = num_tokens // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceLayout:
    """Attention layout over the ranks of a group, which attention gets as `plan`."""

    whole: AttentionLayout  # of all N tokens
    group: SequenceGroup


def register_sequence_attention() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(SEQUENCE_ATTENTION, attention_over_ranks)


def check_sequence_parallel(causal_lm: Any, learner: LearnerSection) -> None:
    """Check that `learner.sequence_parallel` divides the heads, and that the model has no mixers; else InputError."""
    size, text = learner.sequence_parallel, causal_lm.config.get_text_config()
    if size == 1:
        return
    heads, where = text.num_attention_heads, f"learner.sequence_parallel is {size}, but {text.model_type!r} has"
    if heads % size:
        raise InputError(
            f"{where} {heads} attention heads, which {size} ranks can't share evenly. Set learner.sequence_parallel to "
            f"one of {', '.join(str(number) for number in range(1, heads + 1) if heads % number == 0)}."
        )
    if mixers := {type(mixer).__name__ for mixer in mixers_of(causal_lm)}:
        raise InputError(
            f"{where} layers that mix tokens outside of attention ({', '.join(sorted(mixers))}). "
            "Only attention can be computed over several ranks. Set learner.sequence_parallel: 1."
        )


def padded(packing: Packing, size: int) -> Packing:
    """Pad the packing with untrained tokens to a multiple of `size`."""
    missing = -packing.num_tokens % size
    if not missing:
        return packing
    start, end = packing.num_tokens, packing.num_tokens + missing
    return replace(
        packing,
        token_ids=np.pad(packing.token_ids, (0, missing)),
        position_ids=np.concatenate([packing.position_ids, np.arange(missing)]),
        segments=(*packing.segments, Segment(start=start, end=end, subtree_end=end, parent=-1)),
    )


def attention_over_ranks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: SequenceLayout,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention; transformers calls it on every rank with its own n tokens: query (1, Hq, n, D), key
    (1, Hkv, n, D), value (1, Hkv, n, Dv) -> (1, n, Hq, Dv)."""
    group, heads = plan.group, query.shape[1]
    # Repeat key heads if their number is not a multiple of the number of ranks: several ranks then need the same key
    # head.
    copies = math.lcm(key.shape[1], group.size) // key.shape[1]
    key, value = (tensor.repeat_interleave(copies, dim=1) if copies > 1 else tensor for tensor in (key, value))
    if (sinks := options.get("s_aux")) is not None:  # (Hq,): one number for each query head, also of other ranks
        options["s_aux"] = sinks[group.own(heads)]
    query, key, value = _ToHeads.apply(query, key, value, group)  # type: ignore[no-untyped-call]
    output, _ = packed_attention(module, query, key, value, attention_mask, plan=plan.whole, **options)
    tokens: Tensor = _ToTokens.apply(output, group)  # type: ignore[no-untyped-call]
    return tokens, None


class _ToHeads(torch.autograd.Function):
    """Own tokens of all heads -> all tokens of own heads, (1, H, n, D) -> (1, H / size, N, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.group = group
        first, second, third = _to_heads((query, key, value), group)
        return first, second, third

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_to_tokens(tuple(grad.transpose(1, 2) for grad in grads), ctx.group, heads_first=True), None)


class _ToTokens(torch.autograd.Function):
    """All tokens of own heads -> own tokens of all heads, (1, N, H / size, D) -> (1, n, H, D)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        [tokens] = _to_tokens((output,), group)
        return tokens

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        [heads] = _to_heads((grad.transpose(1, 2),), ctx.group)
        return heads.transpose(1, 2), None


def _to_heads(tensors: tuple[Tensor, ...], group: SequenceGroup) -> list[Tensor]:
    size = group.size
    # Order by destination: rank r gets the r-th block of heads.
    parts = [tensor[0].unflatten(0, (size, -1)) for tensor in tensors]  # type: ignore[no-untyped-call]
    received = _exchange(parts, group)  # by source rank: its tokens, own heads (size, H / size, n, D)
    return [part.transpose(0, 1).flatten(1, 2)[None] for part in received]


def _to_tokens(tensors: tuple[Tensor, ...], group: SequenceGroup, *, heads_first: bool = False) -> list[Tensor]:
    """Exchange each (1, N, H / size, D) for (1, n, H, D), or (1, H, n, D) with `heads_first`."""
    parts = [tensor[0].unflatten(0, (group.size, -1)) for tensor in tensors]  # type: ignore[no-untyped-call]
    received = _exchange(parts, group)  # by source rank: its heads, own tokens (size, n, H / size, D)
    order = (0, 2, 1, 3) if heads_first else (1, 0, 2, 3)
    start = 0 if heads_first else 1
    return [part.permute(order).flatten(start, start + 1)[None] for part in received]


def _exchange(parts: list[Tensor], group: SequenceGroup) -> list[Tensor]:
    # Row r of every part goes to rank r; row r of each result comes from rank r.
    flat = torch.cat([part.reshape(group.size, -1) for part in parts], dim=1)
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group.group)
    columns = torch.split(received, [part[0].numel() for part in parts], dim=1)
    return [column.view(part.shape) for column, part in zip(columns, parts, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTokens:
    group: SequenceGroup
    packing: Packing  # of all N tokens, padded to a multiple of the ranks
    tokens: slice  # packed positions
    heads: slice  # range of `head_positions`
    pairs: slice
    num_heads: tuple[int, ...]  # by rank
    num_pairs: tuple[int, ...]  # by rank

    def head_positions(self, batch: MicroBatch) -> NDArray[np.int64]:
        """Return this rank's positions that predict a response token, or position 0, whose result is ignored: FSDP's
        reduction waits for the head's gradient of every rank."""
        positions = batch.head_positions[self.heads] - self.tokens.start
        return positions if positions.size else np.zeros(1, np.int64)


def own_tokens(batch: MicroBatch, group: SequenceGroup) -> OwnTokens:
    packing = padded(batch.packing, group.size)
    edges = np.arange(group.size + 1) * (packing.num_tokens // group.size)
    heads = np.searchsorted(batch.head_positions, edges)
    pairs = np.searchsorted(batch.pair_rows, heads)
    mine = group.rank
    return OwnTokens(
        group=group,
        packing=packing,
        tokens=group.own(packing.num_tokens),
        heads=slice(int(heads[mine]), int(heads[mine + 1])),
        pairs=slice(int(pairs[mine]), int(pairs[mine + 1])),
        num_heads=tuple(np.diff(heads).tolist()),
        num_pairs=tuple(np.diff(pairs).tolist()),
    )


def gather_rows(own: Tensor, sizes: tuple[int, ...], group: SequenceGroup) -> Tensor:
    """Gather rows (sizes[rank],) of all ranks. All must compute the same loss from them: each takes the gradient of its
    own rows from its own loss."""
    rows: Tensor = _GatherRows.apply(own, sizes, group)  # type: ignore[no-untyped-call]
    return rows


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, sizes: tuple[int, ...], group: SequenceGroup) -> Tensor:
        ctx.own = slice(sum(sizes[: group.rank]), sum(sizes[: group.rank + 1]))
        padded_rows = own.new_zeros(max(sizes))
        padded_rows[: own.shape[0]] = own
        everyone = own.new_empty(group.size * max(sizes))
        dist.all_gather_into_tensor(everyone, padded_rows, group=group.group)
        return torch.cat([rows[:size] for rows, size in zip(everyone.chunk(group.size), sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad[ctx.own], None, None
