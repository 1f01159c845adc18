"""Attention over packed, prefix-shared tokens: `attn_implementation="rayapp_packed"` of transformers.

A segment of the radix tree (`packing`) attends to itself causally and to all its ancestors. On CPU blocks of torch's
flash kernel are merged by their log-sum-exp (masked ones, `families/flex`, for windows, caps and sinks). On GPU each
segment is one sequence of varlen flash attention; flex attention computes layers with sinks or a cap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rayapp.core.errors import LearnerError
from rayapp.learner.device import moved
from rayapp.learner.families.flex import (
    Block,
    MaskRule,
    TreeMask,
    blocks_of,
    flex_tree_attention,
    mask_of,
    masked_backward,
    masked_forward,
    tree_mask,
)
from rayapp.learner.packing import Int64Array, Packing, Segment, segment_paths

ATTENTION_NAME = "rayapp_packed"
# Arguments that don't affect the result of packed attention.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "deterministic"}
)

# Call the internal operators of scaled_dot_product_attention: only they return the log-sum-exp, which merging needs.
_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


class PathIndex(NamedTuple):
    """Places of N packed tokens in the K keys of all segments: each one's whole path, which ends with the segment."""

    tokens: Tensor  # packed position of each key, (K,)
    own: Tensor  # key of each token in its own segment, (N,)
    shared: Tensor  # packed positions of the tokens that are keys of several segments, (U,)
    shared_keys: Tensor  # all keys that are such tokens, (I,)
    slots: Tensor  # index in `shared` of each of them, (I,)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenLayout:
    """Arguments of varlen attention on GPU, for S segments whose paths have K keys in total."""

    paths: PathIndex | None  # None: no segment continues another, so the keys are the packed tokens
    cu_queries: Tensor  # first query of each segment, then their number, (S + 1,) int32
    cu_keys: Tensor  # first key of each segment, then their number, (S + 1,) int32
    max_queries: int
    max_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """The tokens to which each token of a forward attends."""

    segments: tuple[Segment, ...]
    max_length: int  # of a path, in tokens
    positions: Tensor  # within each token's own sequence, (N,), on the host
    varlen: VarlenLayout | None  # on GPU
    # Function that makes and caches the mask for layers that the varlen kernel can't compute; None on CPU.
    tree: Callable[[], TreeMask] | None


def plan_attention(packing: Packing, device: torch.device) -> AttentionLayout:
    on_gpu = device.type == "cuda"
    return AttentionLayout(
        segments=packing.segments,
        max_length=int(packing.position_ids.max()) + 1,
        positions=torch.from_numpy(packing.position_ids),
        varlen=varlen_plan(packing, device) if on_gpu else None,
        tree=cache(partial(tree_mask, packing, device)) if on_gpu else None,
    )


def register_attention() -> None:
    """Make ATTENTION_NAME known to transformers. Idempotent."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionLayout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of one layer: query (1, Hq, N, D), key (1, Hkv, N, D), value (1, Hkv, N, Dv) -> (1, N, Hq,
    Dv).

    A query sees `sliding_window` tokens, itself included; scores become softcap * tanh(score / softcap); `s_aux` (Hq,)
    are sinks, one more score in each softmax. LearnerError: the model uses another option.
    """
    if plan is None:
        raise LearnerError("the model's layers call attention without the arguments that packing needs")
    options = others | {"attention_mask": attention_mask, "dropout": dropout or None}
    options |= {"is_causal": is_causal if is_causal is False else None}
    if asked := sorted(name for name, value in options.items() if value is not None and name not in _HARMLESS):
        raise LearnerError(f"{type(module).__name__} uses {', '.join(asked)}, which packed attention does not support")
    window = sliding_window if sliding_window is not None and plan.max_length > sliding_window else None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    rule = MaskRule(scale=scale, window=window, softcap=softcap)
    width, own_width = max(query.shape[-1], value.shape[-1]), value.shape[-1]
    # Pad values with zeros: the kernels need keys and values of equal width, and latent attention has narrower values.
    query, key, value = (pad(tensor, (0, width - tensor.shape[-1])) for tensor in (query, key, value))
    return _attend(query, key, value, s_aux, plan, rule)[..., :own_width], None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: AttentionLayout, rule: MaskRule
) -> Tensor:
    if plan.tree is not None and (sinks is not None or rule.softcap is not None):
        return flex_tree_attention(query, key, value, sinks, plan.tree(), rule)
    if plan.varlen is not None:
        return _varlen_attention(query, key, value, plan.varlen, rule)
    blocks = tuple(blocks_of(plan.segments, plan.positions, rule))
    output: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, sinks, blocks, plan.positions, rule
    )
    return output


def varlen_plan(packing: Packing, device: torch.device) -> VarlenLayout:
    paths = segment_paths(packing.segments)
    queries = [segment.end - segment.start for segment in packing.segments]
    keys = [path.size for path in paths]
    return VarlenLayout(
        paths=_path_index(packing, paths, device) if sum(keys) > packing.num_tokens else None,
        cu_queries=_cumulative(queries, device),
        cu_keys=_cumulative(keys, device),
        max_queries=max(queries),
        max_keys=max(keys),
    )


def _path_index(packing: Packing, paths: Sequence[Int64Array], device: torch.device) -> PathIndex:
    tokens, own = np.concatenate(paths), np.empty(packing.num_tokens, np.int64)
    ends = np.cumsum([path.size for path in paths])
    for segment, end in zip(packing.segments, ends, strict=True):
        own[segment.start : segment.end] = np.arange(end - (segment.end - segment.start), end)
    counts = np.bincount(tokens)
    shared, shared_keys = np.flatnonzero(counts > 1), np.flatnonzero(counts[tokens] > 1)
    slots = np.searchsorted(shared, tokens[shared_keys])
    return PathIndex(*(moved(each, device) for each in (tokens, own, shared, shared_keys, slots)))


def _cumulative(sizes: Sequence[int], device: torch.device) -> Tensor:
    return moved(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32), device)


def _varlen_attention(query: Tensor, key: Tensor, value: Tensor, plan: VarlenLayout, rule: MaskRule) -> Tensor:
    # Each segment's queries are at the end of its keys, as flash attention aligns them.
    from torch.nn.attention.varlen import varlen_attn

    rows_q, rows_k, rows_v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, H, D)
    if plan.paths is not None:
        rows_k, rows_v = (_PathRows.apply(rows, plan.paths) for rows in (rows_k, rows_v))  # type: ignore[no-untyped-call]
    output = varlen_attn(
        rows_q.contiguous(),
        rows_k.contiguous(),
        rows_v.contiguous(),
        plan.cu_queries,
        plan.cu_keys,
        plan.max_queries,
        plan.max_keys,
        scale=rule.scale,
        window_size=(-1 if rule.window is None else rule.window - 1, 0),
        enable_gqa=rows_q.shape[1] != rows_k.shape[1],
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)


class _PathRows(torch.autograd.Function):
    """Copies the rows (N, H, D) of packed tokens to all keys (K, H, D).

    The gradient of indexing sorts all keys on a GPU, in each layer. Here only tokens of several segments are summed, in
    float32.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, paths: PathIndex) -> Tensor:
        ctx.paths = paths
        return rows.index_select(0, paths.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [grad], paths = grads, ctx.paths
        parts = grad.index_select(0, paths.shared_keys).float()
        sums = parts.new_zeros(paths.shared.shape[0], *parts.shape[1:]).index_add_(0, paths.slots, parts)
        return grad.index_select(0, paths.own).index_copy_(0, paths.shared, sums.to(grad.dtype)), None


class _TreeAttention(torch.autograd.Function):
    """Attention on CPU, block by block: a block's gradient needs only the final output and log-sum-exp of its rows.

    In float32, so that merging loses no precision; the flash kernel takes three times as long for a bfloat16 gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        blocks: tuple[Block, ...],
        positions: Tensor,
        rule: MaskRule,
    ) -> Tensor:
        wide = _by_key_head(query, key, value)
        out, lse = _forward_blocks(*wide, blocks, positions, rule)
        if sinks is not None:
            # A sink is a block of one key whose value is 0: it takes a share of every softmax.
            total = torch.logaddexp(lse, _of_heads(sinks, lse))
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.blocks, ctx.positions, ctx.rule = blocks, positions, rule
        return out.flatten(0, 1).transpose(0, 1)[None].to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        wide = _by_key_head(query, key, value)
        grad_out = grad_output[0].transpose(0, 1).unflatten(0, wide[0].shape[:2]).float()  # type: ignore[no-untyped-call]
        narrow = query.dtype == torch.bfloat16
        grads = _backward_blocks(grad_out, *wide, out, lse, ctx.blocks, ctx.positions, ctx.rule, narrow=narrow)
        grad_query = grads[0].flatten(0, 1)[None].to(query.dtype)
        grad_key, grad_value = (grad.sum(dim=1)[None].to(key.dtype) for grad in grads[1:])
        grad_sinks = None
        if sinks is not None:
            share = (_of_heads(sinks, lse) - lse).exp_()
            grad_sinks = -(share * torch.linalg.vecdot(grad_out, out)).sum(-1).reshape(sinks.shape).to(sinks.dtype)
        return grad_query, grad_key, grad_value, grad_sinks, None, None, None


def _of_heads(sinks: Tensor, lse: Tensor) -> Tensor:
    return sinks.float().view(*lse.shape[:2], 1)


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (Hkv, G, N, D) float32; keys and values have stride 0 in G."""
    heads = key.shape[1]
    wide_query: Tensor = query[0].unflatten(0, (heads, -1)).float()  # type: ignore[no-untyped-call]
    shape = wide_query.shape
    return wide_query, key[0].float().unsqueeze(1).expand(shape), value[0].float().unsqueeze(1).expand(shape)


def _forward_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...], positions: Tensor, rule: MaskRule
) -> tuple[Tensor, Tensor]:
    """Return the output (Hkv, G, N, D), laid out by token, and the log-sum-exp (Hkv, G, N)."""
    heads, groups, num_tokens, width = query.shape
    out = query.new_empty(num_tokens, heads, groups, width).permute(1, 2, 0, 3)
    lse = query.new_empty(heads, groups, num_tokens)
    done = 0
    for block in blocks:
        rows, columns = block.rows, block.columns
        part = query[:, :, rows], key[:, :, columns], value[:, :, columns]
        if block.is_masked:
            found, found_lse = masked_forward(*part, mask_of(block, positions, rule), rule)
        else:
            found, found_lse = _flash_forward(*part, 0.0, block.is_own, scale=rule.scale)
        if rows.start == done:  # a row's first block: the row's own segment
            out[:, :, rows], lse[:, :, rows], done = found, found_lse, rows.stop
        else:
            _merge(out[:, :, rows], lse[:, :, rows], found, found_lse)
    return out, lse


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(part, (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def _backward_blocks(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: tuple[Block, ...],
    positions: Tensor,
    rule: MaskRule,
    *,
    narrow: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients (Hkv, G, N, D); `narrow`: products of blocks between two segments in bfloat16, as the model
    does."""
    heads, groups, num_tokens, width = query.shape
    zeros = query.new_zeros(3, num_tokens, heads, groups, width).permute(0, 2, 3, 1, 4)
    for block in blocks:
        rows, own = block.rows, block.columns
        whole = (query[:, :, rows], key[:, :, own], value[:, :, own], out[:, :, rows], lse[:, :, rows])
        if block.is_masked:
            parts = masked_backward(grad_out[:, :, rows], *whole, mask_of(block, positions, rule), rule)
        elif narrow and not block.is_own:
            parts = _narrow_gradient(grad_out[:, :, rows], *whole, scale=rule.scale)
        else:
            parts = _flash_backward(grad_out[:, :, rows], *whole, 0.0, block.is_own, scale=rule.scale)
        for grad, part, where in zip(zeros, parts, (rows, own, own), strict=True):
            # Use add_, because += on a slice would also copy the sum onto itself.
            grad[:, :, where].add_(part)
    return zeros[0], zeros[1], zeros[2]


def _narrow_gradient(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of an unmasked block, in bfloat16 for all query heads of a key head at once.

    2.8 times as fast as the flash kernel where many completions see one prompt. As in flash attention, the weights are
    exp(scores - lse) with the final log-sum-exp.
    """
    shape, heads, width = query.shape, query.shape[0], query.shape[-1]
    rows, grad_rows, out_rows = (tensor.reshape(heads, -1, width) for tensor in (query, grad_out, out))  # (Hkv, GQ, D)
    keys, values = key[:, 0].bfloat16(), value[:, 0].bfloat16()  # (Hkv, K, D)
    rows, grads = rows.bfloat16(), grad_rows.bfloat16()
    weights = torch.bmm(rows, keys.transpose(1, 2)).float().mul_(scale).sub_(lse.reshape(heads, -1, 1)).exp_()
    delta = torch.linalg.vecdot(grad_rows, out_rows).unsqueeze(-1)
    slopes = torch.bmm(grads, values.transpose(1, 2)).float().sub_(delta).mul_(weights).mul_(scale).bfloat16()
    grad_value = torch.bmm(weights.bfloat16().transpose(1, 2), grads)
    grad_key = torch.bmm(slopes.transpose(1, 2), rows)
    # The products already sum over the G query heads of a key head, so only the first query head gets the sum.
    return torch.bmm(slopes, keys).view(shape), _first_head(grad_key, shape[1]), _first_head(grad_value, shape[1])


def _first_head(summed: Tensor, groups: int) -> Tensor:
    """Expand (Hkv, K, D) to (Hkv, G, K, D) float32, with zeros but in the first of G heads."""
    spread = summed.new_zeros(summed.shape[0], groups, *summed.shape[1:], dtype=torch.float32)
    spread[:, 0] = summed
    return spread
