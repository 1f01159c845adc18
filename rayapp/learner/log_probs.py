"""Computes log-probs and entropies of tokens from hidden states, for a chunk of positions at a time.

Logits in float32 exist for at most `chunk_rows` positions. Forward keeps logits in the model's dtype as far as they fit
into one chunk's memory; backward recomputes the others. The softmax is in float32: bfloat16 values near 1 are 1/256
apart, so the gradient of a confident token, 1 - p, would be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayapp.config.learner import CPU_SOFTMAX_ROWS, GPU_SOFTMAX_ROWS
from rayapp.config.other_models import DistillationSection
from rayapp.core.types import AllowedTokens, Int32Array
from rayapp.learner.algo.distillation import kl, kl_gradient
from rayapp.learner.device import compiled, moved
from rayapp.learner.packing import Int64Array

_NOT_ALLOWED = -1e30  # of a token that a form does not allow: probability 0, and finite in sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Tokens that forms allowed at M positions."""

    words: Tensor  # bits, (K, W) int32 on the device, as in `AllowedTokens`
    mask_of: Int32Array  # of each position, (M,), on the host; -1: all tokens

    def applied_to(self, scaled: Tensor, start: int) -> Tensor:
        """Return the scaled logits (C, V) of positions `start`, ... with tokens that are not allowed at -1e30."""
        chosen = self.mask_of[start : start + scaled.shape[0]]
        rows = np.flatnonzero(chosen >= 0)
        if not rows.size:
            return scaled
        index, words = (moved(each, scaled.device) for each in (rows, chosen[rows].astype(np.int64)))
        bits = self.words[words, :, None] >> torch.arange(32, device=scaled.device, dtype=torch.int32) & 1
        is_allowed = bits.flatten(1)[:, : scaled.shape[1]].bool()
        # Don't change them in place: in float32 the scaled logits may be the logits themselves.
        return scaled.index_copy(0, index, scaled[index].masked_fill_(~is_allowed, _NOT_ALLOWED))


def masks_on(device: torch.device, allowed: AllowedTokens) -> Masks:
    return Masks(words=moved(np.array(allowed.masks), device), mask_of=allowed.mask_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """P pairs (position, next token), none twice, to score over M positions: several tokens may follow one position."""

    rows: Tensor  # position of each pair, ascending, (P,)
    token_ids: Tensor  # (P,)
    first_pairs: Int64Array  # first pair of each position, then P, (M + 1,), on the host
    allowed: Masks | None = None


def first_pairs_of(pair_rows: Int64Array, num_positions: int) -> Int64Array:
    """Return the first pair of each position, then their number. Example: 3 positions, [0, 0, 2] -> [0, 2, 2, 3]."""
    return np.searchsorted(pair_rows, np.arange(num_positions + 1)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    temperature: float
    chunk_rows: int
    softcap: float | None = None  # logits become cap * tanh(logit / cap), before the temperature
    entropy_needs_grad: bool = False
    needs_sum_pi_squared: bool = False
    softmax_rows: int | None = None  # in one softmax; None: the device's CPU_SOFTMAX_ROWS or GPU_SOFTMAX_ROWS
    is_compiled: bool = False  # where `fuses` allows it, read the logits twice without float32 copies, not 18 times

    def rows_together(self, logits: Tensor) -> int:
        return self.softmax_rows or (CPU_SOFTMAX_ROWS if logits.device.type == "cpu" else GPU_SOFTMAX_ROWS)

    def fuses(self, teacher: TeacherHead | None, allowed: Masks | None) -> bool:
        asks_more = self.entropy_needs_grad or self.needs_sum_pi_squared or self.softcap is not None
        return self.is_compiled and teacher is None and allowed is None and not asks_more


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHead:
    """The teacher's hidden states (M, H') at the policy's positions, and its output embedding (V, H')."""

    hidden: Tensor
    weight: Tensor
    options: HeadOptions
    section: DistillationSection

    def log_probs(self, start: int, stop: int) -> Tensor:
        """Return log-probs at positions [start, stop): (stop - start, V) float32."""
        return torch.log_softmax(_scaled(self.hidden[start:stop] @ self.weight.t(), self.options), dim=-1)


def token_log_probs(
    hidden: Tensor, weight: Tensor, targets: Targets, options: HeadOptions, teacher: TeacherHead | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probs of the targets (P,), and of each position (M,): entropy, sum of squared probabilities, KL to the
    teacher, all float32; from `hidden` (M, H) after the final norm and the output embedding (V, H).

    Entropy has a gradient with `entropy_needs_grad`; the sums are 0 without `needs_sum_pi_squared`.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets.rows, targets.token_ids, targets.first_pairs, options, teacher, targets.allowed
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
        allowed: Masks | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        keep_rows = options.chunk_rows * 4 // weight.element_size() if needs_grad else 0
        num_rows = hidden.shape[0]
        log_probs = hidden.new_empty(rows.shape[0], dtype=torch.float32)
        entropy, squares, teacher_kl = hidden.new_zeros(3, num_rows, dtype=torch.float32)
        is_fused = options.fuses(teacher, allowed)
        log_norms, kept = list[Tensor](), list[Tensor]()
        for start, stop in _chunks(num_rows, options.chunk_rows):
            logits = hidden[start:stop] @ weight.t()  # (C, V)
            first, last = int(first_pairs[start]), int(first_pairs[stop])
            pairs = (rows[first:last] - start, token_ids[first:last])
            outputs = (log_probs[first:last], entropy[start:stop], squares[start:stop])
            inputs = _Logits(logits, options, allowed, start)
            if is_fused:
                log_norm, entropy[start:stop] = compiled(_log_norms)(logits, options.temperature)
                log_probs[first:last] = _target_log_probs(logits, log_norm, pairs, options.temperature)
                log_norms.append(log_norm)
            else:
                _score(inputs, pairs, first_pairs[start : stop + 1] - first, outputs)
            if teacher is not None:
                for low, high in _chunks(stop - start, options.rows_together(logits)):
                    log_p = torch.log_softmax(inputs.scaled(low, high), dim=-1)
                    log_q = teacher.log_probs(start + low, start + high)
                    teacher_kl[start + low : start + high] = kl(log_p, log_q, teacher.section)
            if stop <= keep_rows:
                kept.append(logits)
        ctx.save_for_backward(hidden, weight, rows, token_ids, *kept)
        ctx.options, ctx.first_pairs, ctx.teacher = options, first_pairs, teacher
        ctx.allowed, ctx.log_norms = allowed, log_norms
        ctx.mark_non_differentiable(*([squares] if teacher is not None else [squares, teacher_kl]))
        if not options.entropy_needs_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy, squares, teacher_kl

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor | None, _: Tensor | None, grad_kl: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None, None]:
        hidden, weight, rows, token_ids, *kept = ctx.saved_tensors
        options: HeadOptions = ctx.options
        scale = 1.0 / options.temperature
        if not options.entropy_needs_grad:
            grad_entropy = None
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight: Tensor | None = None
        chunks = _chunks(hidden.shape[0], options.chunk_rows)
        for number, (start, stop) in enumerate(chunks):
            inner = hidden[start:stop]
            logits = kept[number] if number < len(kept) else inner @ weight.t()
            first, last = int(ctx.first_pairs[start]), int(ctx.first_pairs[stop])
            slopes = _Slopes(
                rows=rows[first:last] - start,
                token_ids=token_ids[first:last],
                first_pairs=ctx.first_pairs[start : stop + 1] - first,
                log_probs=grad_log_probs[first:last].float() * scale,
                entropy=None if grad_entropy is None else grad_entropy[start:stop] * scale,
                teacher=None if ctx.teacher is None else (ctx.teacher, start, grad_kl[start:stop] * scale),
            )
            if ctx.log_norms:
                _fill_gradient(logits, ctx.log_norms[number], slopes, options.temperature)
                grad_logits = logits
            else:
                grad_logits = _to_gradient(_Logits(logits, options, ctx.allowed, start), slopes)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[start:stop])
            if ctx.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, grad_logits.t(), inner, is_only=len(chunks) == 1)
            del logits, grad_logits  # free the logits before the next chunk is computed
        narrow = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, narrow, None, None, None, None, None, None


def _add_product(total: Tensor | None, left: Tensor, right: Tensor, *, is_only: bool) -> Tensor:
    """Return total + left @ right, in float32 unless it is the only one: in bfloat16 each addition would lose bits."""
    if is_only:
        return left @ right
    if left.dtype == torch.bfloat16 and _adds_products(left.device):
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    part = left @ right
    return part.float() if total is None else total.add_(part)


@cache
def _adds_products(device: torch.device) -> bool:
    """Return whether one kernel adds a product in bfloat16 to a sum in float32, as on a GPU."""
    total, ones = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device, dtype=torch.bfloat16)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _chunks(num_rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


class _Logits(NamedTuple):
    logits: Tensor  # (C, V)
    options: HeadOptions
    allowed: Masks | None
    first: int  # chunk's first position among the M

    def scaled(self, start: int, stop: int) -> Tensor:
        """Return the softmax's input for rows [start, stop)."""
        scaled = _scaled(self.logits[start:stop], self.options)
        return scaled if self.allowed is None else self.allowed.applied_to(scaled, self.first + start)


def _score(
    inputs: _Logits,
    pairs: tuple[Tensor, Tensor],
    first_pairs: Int64Array,
    outputs: tuple[Tensor, Tensor, Tensor],
) -> None:
    rows, token_ids = pairs
    log_probs, entropy, squares = outputs
    logits, options = inputs.logits, inputs.options
    for start, stop in _chunks(logits.shape[0], options.rows_together(logits)):
        scaled = inputs.scaled(start, stop)
        probs = torch.softmax(scaled, dim=-1)
        # Compute log Z from the largest probability, which is at least 1 / V, so that its log never underflows.
        index = scaled.argmax(dim=-1, keepdim=True)
        log_norm = (scaled.gather(-1, index) - probs.gather(-1, index).log_())[:, 0]
        first, last = int(first_pairs[start]), int(first_pairs[stop])
        local = rows[first:last] - start
        log_probs[first:last] = scaled[local, token_ids[first:last]] - log_norm[local]
        # H = log Z - sum p z takes two reads of the chunk and no temporary tensor.
        entropy[start:stop] = log_norm - _row_dots(probs, scaled)
        if options.needs_sum_pi_squared:
            squares[start:stop] = _row_dots(probs, probs)


def _log_norms(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log Z and the entropy (C,) of logits (C, V). Compiled it is one kernel without temporaries (C, V)."""
    scaled = logits.float() / temperature
    largest = scaled.amax(dim=-1, keepdim=True)
    below = scaled - largest
    weights = below.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    return largest[:, 0] + log_total, log_total - (weights * below).sum(dim=-1) / total


def _target_log_probs(logits: Tensor, log_norm: Tensor, pairs: tuple[Tensor, Tensor], temperature: float) -> Tensor:
    return logits[pairs].float() / temperature - log_norm[pairs[0]]


def _fill_gradient(logits: Tensor, log_norm: Tensor, slopes: _Slopes, temperature: float) -> None:
    """Replace logits as `_to_gradient` does. Targets are computed in float32 before their logits are overwritten."""
    per_row = torch.zeros_like(log_norm).index_add_(0, slopes.rows, slopes.log_probs)
    targets = (slopes.rows, slopes.token_ids)
    p = _target_log_probs(logits, log_norm, targets, temperature).exp()
    compiled(_fill_slopes)(logits, log_norm, per_row, temperature)
    logits.index_put_(targets, (slopes.log_probs - p * per_row[slopes.rows]).to(logits.dtype))


def _fill_slopes(logits: Tensor, log_norm: Tensor, per_row: Tensor, temperature: float) -> None:
    logits.copy_((logits.float() / temperature - log_norm[:, None]).exp() * -per_row[:, None])


def _scaled(logits: Tensor, options: HeadOptions) -> Tensor:
    scaled = logits.float()
    if options.softcap is not None:
        scaled = (scaled / options.softcap).tanh_().mul_(options.softcap)
    return scaled / options.temperature if options.temperature != 1.0 else scaled


def _row_dots(first: Tensor, second: Tensor) -> Tensor:
    """Return the rows' dot products, (C, V) -> (C,), without a temporary tensor."""
    return torch.bmm(first.unsqueeze(1), second.unsqueeze(2)).view(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slopes:
    """Gradients of the loss for the scores of C positions, divided by the temperature, in float32."""

    rows: Tensor  # position of each pair, (P,)
    token_ids: Tensor  # (P,)
    first_pairs: Int64Array  # first pair of each position, then P, (C + 1,)
    log_probs: Tensor  # (P,)
    entropy: Tensor | None  # (C,)
    # Teacher, the chunk's first position, and gradients for each KL (C,).
    teacher: tuple[TeacherHead, int, Tensor] | None


def _to_gradient(inputs: _Logits, slopes: _Slopes) -> Tensor:
    """Replace logits (C, V) in place by the loss's gradient: d log p_t = onehot_t - p, d H = -p (log p + H)."""
    logits, options = inputs.logits, inputs.options
    per_row = logits.new_zeros(logits.shape[0], dtype=torch.float32).index_add_(0, slopes.rows, slopes.log_probs)
    for start, stop in _chunks(logits.shape[0], options.rows_together(logits)):
        own = slice(start, stop)
        # Don't assign the scaled logits to a variable: they would stay in memory beside the gradients.
        if slopes.entropy is None and slopes.teacher is None:
            grads = torch.softmax(inputs.scaled(start, stop), dim=-1).mul_(-per_row[own, None])
        else:
            log_p = torch.log_softmax(inputs.scaled(start, stop), dim=-1)
            grads = _distribution_gradient(log_p, per_row, own, slopes)
            del log_p
        pairs = slice(int(slopes.first_pairs[start]), int(slopes.first_pairs[stop]))
        # Where trajectories branch, a position has several targets; the gradients of the targets add up.
        targets = (slopes.rows[pairs] - start, slopes.token_ids[pairs])
        grads.index_put_(targets, slopes.log_probs[pairs], accumulate=True)
        if (cap := options.softcap) is not None:
            # d/dx (cap * tanh(x / cap)) = 1 - tanh(x / cap)^2
            capped = logits[own].to(torch.float32, copy=True).div_(cap).tanh_()
            grads.mul_(capped.square_().neg_().add_(1.0))
        logits[own] = grads
    return logits


def _distribution_gradient(log_p: Tensor, per_row: Tensor, own: slice, slopes: _Slopes) -> Tensor:
    """Return the gradient (rows, V) without the targets' one-hot terms."""
    towards: Tensor | None = None
    if slopes.teacher is not None:
        teacher, first, grad_kl = slopes.teacher
        towards = kl_gradient(log_p, teacher.log_probs(first + own.start, first + own.stop), teacher.section)
        towards.mul_(grad_kl[own, None])
    p = log_p.exp()
    if slopes.entropy is None:
        grads = p.mul_(-per_row[own, None])
    else:
        # Compute the entropy from log p: the forward's log Z - sum p z has the rounding error of the largest logit.
        entropy = -_row_dots(p, log_p)
        grads = log_p.add_(entropy[:, None]).mul_(slopes.entropy[own, None]).add_(per_row[own, None]).neg_().mul_(p)
    return grads if towards is None else grads.add_(towards)
