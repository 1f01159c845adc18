"""Log-probabilities and entropies of tokens from hidden states, a chunk of the vocabulary's logits at a time.

Called by `PolicyModel` at the end of its forward. The logits of more than `chunk_rows` positions never exist together,
in any dtype wider than the model's: forward keeps the *probabilities* of as many positions as fit in the memory that
one float32 chunk would take, and backward recomputes the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayapp.config.distillation import DistillationSection
from rayapp.learner.algo.distillation import kl, kl_gradient
from rayapp.learner.packing import Int64Array

CACHE_ROWS = 64
"""Rows that go through the softmax together on CPU: 64 x 49152 float32 stay in the last-level cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The P tokens to score: pairs of one of M positions and a token that follows it."""

    rows: Tensor
    """(P,) which of the M positions, ascending."""
    token_ids: Tensor
    """(P,)"""
    first_pairs: Int64Array
    """(M + 1,) the first pair of each position, and P: on the host, so that no chunk waits for a GPU's queue."""


def first_pairs_of(pair_rows: Int64Array, num_positions: int) -> Int64Array:
    """The first pair of each of M positions, and the number of pairs.

    Example: pairs of positions [0, 0, 2] of 3 -> [0, 2, 2, 3].
    """
    return np.searchsorted(pair_rows, np.arange(num_positions + 1)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """How the output head computes, and what it returns."""

    temperature: float
    chunk_rows: int
    softcap: float | None = None
    """Logits become cap * tanh(logit / cap), before the temperature; None: they stay."""
    entropy_needs_grad: bool = False
    needs_sum_pi_squared: bool = False
    softmax_rows: int | None = None
    """Rows that go through the softmax together; None: a whole chunk on a GPU, CACHE_ROWS on a CPU."""

    def rows_together(self, logits: Tensor) -> int:
        return self.softmax_rows or (CACHE_ROWS if logits.device.type == "cpu" else logits.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHead:
    """The teacher at the same M positions: its distributions are made as the policy's are, a chunk at a time."""

    hidden: Tensor
    """(M, H')"""
    weight: Tensor
    """(V, H')"""
    options: HeadOptions
    section: DistillationSection

    def log_probs(self, start: int, stop: int) -> Tensor:
        """Those of some of the positions, (stop - start, V) float32."""
        return torch.log_softmax(_scaled(self.hidden[start:stop] @ self.weight.t(), self.options), dim=-1)


def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Targets, options: HeadOptions, teacher: TeacherHead | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs of the targets at the given temperature.

    Args:
        hidden: (M, H) hidden states after the final norm.
        weight: (V, H) of the output embedding.
        teacher: to compare with; it gets no gradient.
    Returns:
        log_probs (P,), entropy (M,), sum over the vocabulary of squared probabilities (M,) and the KL between policy
        and teacher (M,), all float32. Entropy carries a gradient only when asked to; the third is zeros unless asked
        for, the last without a teacher.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets.rows, targets.token_ids, targets.first_pairs, options, teacher
    )
    return result


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        token_ids: Tensor,
        first_pairs: Int64Array,
        options: HeadOptions,
        teacher: TeacherHead | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        # The slope of a cap needs logits again, which probabilities don't tell.
        keeps = needs_grad and options.softcap is None
        keep_rows = options.chunk_rows * 4 // weight.element_size() if keeps else 0
        num_rows = hidden.shape[0]
        log_probs = hidden.new_empty(rows.shape[0], dtype=torch.float32)
        entropy, squares, teacher_kl = hidden.new_zeros(3, num_rows, dtype=torch.float32)
        kept: list[Tensor] = []
        for start, stop in _chunks(num_rows, options.chunk_rows):
            logits = hidden[start:stop] @ weight.t()  # (C, V)
            first, last = int(first_pairs[start]), int(first_pairs[stop])
            pairs = (rows[first:last] - start, token_ids[first:last])
            outputs = (log_probs[first:last], entropy[start:stop], squares[start:stop])
            _to_probabilities(logits, pairs, first_pairs[start : stop + 1] - first, outputs, options)
            if teacher is not None:
                for own, log_p, log_q in _beside(logits, teacher, start, options):
                    teacher_kl[start:stop][own] = kl(log_p, log_q, teacher.section)
            if stop <= keep_rows:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, rows, token_ids, entropy, *kept)
        ctx.options, ctx.first_pairs, ctx.teacher = options, first_pairs, teacher
        ctx.mark_non_differentiable(*([squares] if teacher is not None else [squares, teacher_kl]))
        if not options.entropy_needs_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy, squares, teacher_kl

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor | None, _: Tensor | None, grad_kl: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, rows, token_ids, entropy, *kept = ctx.saved_tensors
        options: HeadOptions = ctx.options
        if not options.entropy_needs_grad:
            grad_entropy = None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        chunks = _chunks(hidden.shape[0], options.chunk_rows)
        for number, (start, stop) in enumerate(chunks):
            inner = hidden[start:stop]
            probs = kept[number] if number < len(kept) else _probabilities(inner, weight, options)
            first, last = int(ctx.first_pairs[start]), int(ctx.first_pairs[stop])
            pairs = (rows[first:last] - start, token_ids[first:last])
            entropy_grads = None if grad_entropy is None else (entropy[start:stop], grad_entropy[start:stop])
            towards = _towards_teacher(probs, ctx.teacher, start, grad_kl[start:stop], options)
            grad_logits = _grad_logits(probs, pairs, grad_log_probs[first:last], entropy_grads, options)
            if towards is not None:
                grad_logits.add_(towards)
            if options.softcap is not None:
                # d (cap * tanh(x / cap)) = 1 - tanh(x / cap)^2
                grad_logits.mul_(1 - (inner @ weight.t()).div_(options.softcap).tanh_().square_())
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[start:stop])
            if ctx.needs_input_grad[1]:
                grad_weight = _accumulate(grad_weight, grad_logits.t() @ inner, is_only=len(chunks) == 1)
            del probs, grad_logits  # or they would be there while the next chunk is computed
        narrow = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, narrow, None, None, None, None, None


def _accumulate(total: Tensor | None, part: Tensor, *, is_only: bool) -> Tensor:
    """Add a chunk's gradient in float32: in bfloat16 each addition would lose bits of the sum so far."""
    if is_only:
        return part
    return part.float() if total is None else total.add_(part)


def _chunks(num_rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


def _to_probabilities(
    logits: Tensor,
    pairs: tuple[Tensor, Tensor],
    first_pairs: Int64Array,
    outputs: tuple[Tensor, Tensor, Tensor],
    options: HeadOptions,
) -> None:
    """Replace logits (C, V) by probabilities in place; fill log-probs of the pairs, entropies, and squares."""
    rows, token_ids = pairs
    log_probs, entropy, squares = outputs
    for start, stop in _chunks(logits.shape[0], options.rows_together(logits)):
        scaled = _scaled(logits[start:stop], options)
        probs = torch.softmax(scaled, dim=-1)
        # log Z from the largest probability: that one is at least 1 / V, so its log never underflows.
        index = scaled.argmax(dim=-1, keepdim=True)
        log_norm = (scaled.gather(-1, index) - probs.gather(-1, index).log_())[:, 0]
        first, last = int(first_pairs[start]), int(first_pairs[stop])
        local = rows[first:last] - start
        log_probs[first:last] = scaled[local, token_ids[first:last]] - log_norm[local]
        # H = log Z - sum p z: two reads of the chunk, no temporary.
        entropy[start:stop] = log_norm - _row_dots(probs, scaled)
        if options.needs_sum_pi_squared:
            squares[start:stop] = _row_dots(probs, probs)
        logits[start:stop] = probs


def _scaled(logits: Tensor, options: HeadOptions) -> Tensor:
    """Logits in float32 as they go into the softmax."""
    scaled = logits.float()
    if options.softcap is not None:
        scaled = (scaled / options.softcap).tanh_().mul_(options.softcap)
    return scaled / options.temperature if options.temperature != 1.0 else scaled


def _row_dots(first: Tensor, second: Tensor) -> Tensor:
    """Dot products of rows (C, V) -> (C,), without the temporary that a product and a sum would make."""
    return torch.bmm(first.unsqueeze(1), second.unsqueeze(2)).view(-1)


def _probabilities(hidden: Tensor, weight: Tensor, options: HeadOptions) -> Tensor:
    """Softmax of a chunk again, (C, V) in the model's dtype."""
    logits = hidden @ weight.t()
    for start, stop in _chunks(logits.shape[0], options.rows_together(logits)):
        logits[start:stop] = torch.softmax(_scaled(logits[start:stop], options), dim=-1)
    return logits


def _beside(
    probs: Tensor, teacher: TeacherHead, start: int, options: HeadOptions
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Which rows of a chunk, and their log-probs (C, V) under policy and teacher: as many rows as go together."""
    for first, last in _chunks(probs.shape[0], options.rows_together(probs)):
        log_probs = probs[first:last].float().clamp_min(torch.finfo(torch.float32).tiny).log_()
        yield slice(first, last), log_probs, teacher.log_probs(start + first, start + last)


def _towards_teacher(
    probs: Tensor, teacher: TeacherHead | None, start: int, grad_kl: Tensor, options: HeadOptions
) -> Tensor | None:
    """(C, V) gradient of the KL by a chunk's logits."""
    if teacher is None:
        return None
    grads = torch.empty_like(probs)
    for own, log_p, log_q in _beside(probs, teacher, start, options):
        grads[own] = kl_gradient(log_p, log_q, teacher.section) * (grad_kl[own, None] / options.temperature)
    return grads


def _grad_logits(
    probs: Tensor,
    pairs: tuple[Tensor, Tensor],
    grad_log_probs: Tensor,
    entropy_grads: tuple[Tensor, Tensor] | None,
    options: HeadOptions,
) -> Tensor:
    """(C, V) gradient, in place of probs: d log p_t = onehot_t - p, d H = -p (log p + H), both over temperature."""
    rows, token_ids = pairs
    scale = 1.0 / options.temperature
    grads = (grad_log_probs * scale).float()
    per_row = torch.zeros(probs.shape[0], dtype=torch.float32, device=probs.device).index_add_(0, rows, grads)
    if entropy_grads is None:
        grad_logits = probs.mul_(-per_row[:, None].to(probs.dtype))
    else:
        entropy, grad_entropy = entropy_grads
        log_probs = probs.float().clamp_min(torch.finfo(torch.float32).tiny).log_()
        slope = (log_probs + entropy[:, None]).mul_(grad_entropy[:, None] * scale)
        grad_logits = slope.add_(per_row[:, None]).neg_().mul_(probs).to(probs.dtype)
    # One position may have several targets, where trajectories part: they add up.
    return grad_logits.index_put_((rows, token_ids), grads.to(grad_logits.dtype), accumulate=True)
